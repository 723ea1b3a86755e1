#!/bin/sh
# Fill deploy/wheelhouse with all that the images `base` and `cpu` install, by the pip of $VENV and
# whatever it is configured to ask. Run it with the Python version that the images have (3.11).
#   TORCH_INDEX  where to get CPU builds of torch when the configured sources have none
set -eu
cd "$(dirname "$0")/.."
pip="${VENV:-.venv}/bin/python -m pip"
wanted=$(mktemp)
trap 'rm -f "$wanted"' EXIT
python3 deploy/requirements.py cpu > "$wanted"
# What builds and starts an image; async-timeout is for a Python older than 3.11.3, as Debian 12's.
printf '%s\n' dumb-init pip hatchling async-timeout >> "$wanted"
fetch() { $pip download -q --disable-pip-version-check --dest deploy/wheelhouse -c constraints.txt -r "$wanted" "$@"; }
fetch || fetch --extra-index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}"
echo "$(ls deploy/wheelhouse/*.whl | wc -l) wheels, $(du -sm deploy/wheelhouse | cut -f1) MB in deploy/wheelhouse"
