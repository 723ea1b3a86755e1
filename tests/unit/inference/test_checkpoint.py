"""What a model folder holds, from the headers of its files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from muster.errors import InvalidInput
from services.inference.adapters.checkpoint import tensor_shapes


def test_names_and_shapes_of_all_files(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, 3)}, tmp_path / "1.safetensors", metadata={"format": "pt"})
    save_file({"b": torch.ones(4)}, tmp_path / "2.safetensors")

    assert tensor_shapes(tmp_path) == {"a": (2, 3), "b": (4,)}


@pytest.mark.parametrize("content", [b"", b"\xff" * 20, b"\x02" + bytes(7) + b"[}"])
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)

    with pytest.raises(InvalidInput) as refused:
        tensor_shapes(tmp_path)

    assert refused.value.value == str(path)
