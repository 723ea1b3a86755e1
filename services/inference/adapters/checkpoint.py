"""What a model folder contains, read from the headers of its safetensors files.

Promise: reads a few kilobytes, loads no tensor. Does not cover: whether the engine can run it.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

from muster.errors import InvalidInput

_HEADER_BYTES_MAX = 100 << 20  # the format's own limit


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor in the folder. InvalidInput for a broken file."""
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, entry in _header(path).items():
            if name != "__metadata__":
                found[name] = tuple(entry["shape"])
    return found


def _header(path: Path) -> dict[str, dict[str, list[int]]]:
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > _HEADER_BYTES_MAX:
                raise ValueError(f"header of {size} bytes")
            header: dict[str, dict[str, list[int]]] = json.loads(file.read(size))
            return header
    except (OSError, ValueError, struct.error) as error:
        raise InvalidInput(
            f"not a readable safetensors file: {error}",
            field="model.path",
            value=path,
            way_out="restore that file, or give another model folder",
        ) from error
