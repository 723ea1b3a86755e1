#!/usr/bin/env bash
# Generate muster/v1 from protos/ into the folder given (default: the source tree).
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-.}
bin=${BIN:-.venv/bin}
mkdir -p "$out/muster/v1"
PATH="$PWD/$bin:$PATH" "$bin/python" -m grpc_tools.protoc -I protos \
  --python_out="$out" --mypy_out="$out" --grpc_python_out="$out" --mypy_grpc_out="$out" \
  protos/muster/v1/*.proto
