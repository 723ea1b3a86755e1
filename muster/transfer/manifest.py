"""What one policy version consists of, and whether what arrived is that.

Owns: `Manifest` and its checks. Promise: no I/O, no clock; torch is imported inside the functions
that touch tensors. The digest covers name, shape, dtype and bytes of every tensor in order, so
two versions with equal weights have equal digests and half an update never verifies.
Does not cover: moving the bytes (group.py).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

from muster.errors import InvalidInput
from muster.types import Value

ALIGN_BYTES = (
    64  # every tensor starts on a multiple of this in the stream, so any dtype may view it
)
_ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


class TensorSpec(Value, frozen=True):
    """One tensor: its name in the checkpoint, shape, dtype (torch's word), sha256 of its bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: str

    @property
    def nbytes(self) -> int:
        """Size of the raw bytes."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


class Manifest(Value, frozen=True):
    """One policy version: `digest` names its weights, `bytes_total` is the sum of all tensors."""

    version: int
    parent: int
    tensors: tuple[TensorSpec, ...]
    digest: str
    bytes_total: int


class Slot(Value, frozen=True):
    """Where a tensor lies in the stream: bytes [start, end)."""

    start: int
    end: int


def build(state: Mapping[str, Any], *, version: int, parent: int) -> Manifest:
    """Manifest of `state` (name → torch tensor, any device), in the mapping's own order."""
    specs = tuple(
        TensorSpec(name, tuple(tensor.shape), dtype_name(tensor), tensor_digest(tensor))
        for name, tensor in state.items()
    )
    total = sum(spec.nbytes for spec in specs)
    return checked(Manifest(version, parent, specs, weights_digest(specs), total))


def weights_digest(specs: tuple[TensorSpec, ...]) -> str:
    """sha256 over the entries in order, hexadecimal; depends on nothing but the weights."""
    total = hashlib.sha256()
    for spec in specs:
        shape = ",".join(str(size) for size in spec.shape)
        total.update(f"{spec.name}\0{spec.dtype}\0{shape}\0{spec.digest}\n".encode())
    return total.hexdigest()


def checked(manifest: Manifest) -> Manifest:
    """The same manifest if it is consistent in itself; else InvalidInput."""
    if not manifest.tensors:
        raise _bad("manifest.tensors", "", "it names no tensor", "publish the whole model")
    for spec in manifest.tensors:
        if spec.dtype not in _ITEM_BYTES:
            known = ", ".join(_ITEM_BYTES)
            raise _bad(f"{spec.name}.dtype", spec.dtype, "unknown dtype", f"one of {known}")
        if any(size < 0 for size in spec.shape):
            raise _bad(f"{spec.name}.shape", spec.shape, "a size is negative", "send real shapes")
    names = [spec.name for spec in manifest.tensors]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise _bad("manifest.tensors", twice, "named twice", "send each tensor once")
    total = sum(spec.nbytes for spec in manifest.tensors)
    if total != manifest.bytes_total:
        way_out = f"the tensors sum to {total}"
        raise _bad("manifest.bytes_total", manifest.bytes_total, "wrong total", way_out)
    digest = weights_digest(manifest.tensors)
    if digest != manifest.digest:
        way_out = f"the entries hash to {digest}"
        raise _bad("manifest.digest", manifest.digest, "does not match the entries", way_out)
    return manifest


def check_complete(manifest: Manifest, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise InvalidInput unless `manifest` has exactly the tensors of the checkpoint served.

    expected: name → shape. Engines take half an update without a word, so this is ours to check.
    """
    sent = {spec.name: spec.shape for spec in manifest.tensors}
    missing, extra = expected.keys() - sent.keys(), sent.keys() - expected.keys()
    if missing:
        text = f"{len(missing)} tensors of the model are missing, first {min(missing)!r}"
        raise _bad("manifest.tensors", len(sent), text, "publish every tensor of the checkpoint")
    if extra:
        text = f"{len(extra)} tensors are not in the model, first {min(extra)!r}"
        way_out = "publish exactly the tensors that the checkpoint has (no tied copies)"
        raise _bad("manifest.tensors", len(sent), text, way_out)
    for name, shape in sent.items():
        if shape != tuple(expected[name]):
            way_out = f"the model has {tuple(expected[name])}"
            raise _bad(f"{name}.shape", shape, "not the model's shape", way_out)


def layout(manifest: Manifest) -> tuple[tuple[Slot, ...], int]:
    """Slot of every tensor in the stream, and the length of the stream in bytes."""
    slots, at = [], 0
    for spec in manifest.tensors:
        slots.append(Slot(at, at + spec.nbytes))
        at = -(-(at + spec.nbytes) // ALIGN_BYTES) * ALIGN_BYTES
    return tuple(slots), at


def buckets(total: int, bucket_bytes: int) -> list[Slot]:
    """The stream cut into pieces of at most `bucket_bytes`; the same on every rank."""
    return [Slot(at, min(at + bucket_bytes, total)) for at in range(0, total, bucket_bytes)]


def pack(state: Mapping[str, Any], manifest: Manifest) -> Any:
    """The stream: one flat uint8 CPU tensor, padding zero. InvalidInput if `state` differs."""
    import torch

    slots, total = layout(manifest)
    stream = torch.zeros(total, dtype=torch.uint8)
    for spec, slot in zip(manifest.tensors, slots, strict=True):
        tensor = state[spec.name]
        if tuple(tensor.shape) != spec.shape or dtype_name(tensor) != spec.dtype:
            raise _bad(
                spec.name, tuple(tensor.shape), "changed since the manifest", "build it anew"
            )
        stream[slot.start : slot.end].copy_(_raw(tensor))
    return stream


def unpack(stream: Any, manifest: Manifest) -> dict[str, Any]:
    """Name → tensor views into `stream` (a flat uint8 tensor); no copy."""
    import torch

    slots, _ = layout(manifest)
    return {
        spec.name: stream[slot.start : slot.end].view(getattr(torch, spec.dtype)).view(spec.shape)
        for spec, slot in zip(manifest.tensors, slots, strict=True)
    }


def mismatch(tensors: Mapping[str, Any], manifest: Manifest) -> str:
    """Empty if every digest is right and every value finite; else what is wrong, for people."""
    for spec in manifest.tensors:
        tensor = tensors[spec.name]
        if tensor_digest(tensor) != spec.digest:
            return f"{spec.name}: the bytes that arrived do not have the digest of the manifest"
        if tensor.is_floating_point() and not _finite(tensor):
            return f"{spec.name}: has values that are not finite"
    return ""


def _finite(tensor: Any) -> bool:
    """A finite sum has finite terms; finite terms may overflow a sum, so look again then."""
    import torch

    values = tensor.float() if tensor.element_size() == 1 else tensor
    total = values.sum(dtype=torch.float32)
    return bool(torch.isfinite(total)) or bool(torch.isfinite(values).all())


def tensor_digest(tensor: Any) -> str:
    """sha256 of the raw bytes, hexadecimal."""
    return hashlib.sha256(_raw(tensor).numpy()).hexdigest()


def dtype_name(tensor: Any) -> str:
    """torch's word for the dtype, without the prefix."""
    return str(tensor.dtype).removeprefix("torch.")


def _raw(tensor: Any) -> Any:
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _bad(field: str, value: object, problem: str, way_out: str) -> InvalidInput:
    return InvalidInput(problem, field=field, value=value, way_out=way_out)
