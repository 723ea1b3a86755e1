#!/usr/bin/env bash
# Fail when the committed muster/v1 is not what protos/ generates.
set -euo pipefail
cd "$(dirname "$0")/.."
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
scripts/proto.sh "$made" 2> >(grep -v "^Writing mypy" >&2)
if ! diff -r -q --exclude=__pycache__ --exclude=__init__.py "$made/muster/v1" muster/v1; then
  echo "muster/v1 is not what protos/ generates → make proto, then commit it" >&2
  exit 1
fi
echo "muster/v1 is what protos/ generates"
