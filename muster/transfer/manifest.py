"""What one policy version consists of, and whether what arrived is that.

Owns: `Manifest` and its checks. Promise: no I/O, no clock; torch is imported inside the functions
that touch tensors. The digest covers name, shape, dtype and bytes of every tensor in order, so
two versions with equal weights have equal digests and half an update never verifies. Tensors are
hashed with XXH3-128, which keeps up with the line: it finds what went wrong, not who lies; a
trainer is trusted with the weights anyway.
Does not cover: moving the bytes (group.py).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from muster.errors import InvalidInput
from muster.types import Value

ALIGN_BYTES = (
    64  # every tensor starts on a multiple of this in the stream, so any dtype may view it
)
_LEAST_BUCKET_BYTES = 8 << 20
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
    """One tensor: its name in the checkpoint, shape, dtype (torch's word), XXH3-128 of its bytes,
    hexadecimal."""

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
    """Manifest of `state` (name → torch tensor, any device), ordered by name."""
    specs = tuple(
        TensorSpec(name, tuple(tensor.shape), dtype_name(tensor), digest(raw(tensor)))
        for name, tensor in sorted(state.items())
    )
    return of_specs(specs, version=version, parent=parent)


def of_specs(specs: tuple[TensorSpec, ...], *, version: int, parent: int) -> Manifest:
    """The manifest of these tensors. Raises InvalidInput for what no engine could take."""
    check_specs(specs)
    total = sum(spec.nbytes for spec in specs)
    return Manifest(version, parent, specs, weights_digest(specs), total)


def weights_digest(specs: tuple[TensorSpec, ...]) -> str:
    """sha256 over the entries in order, hexadecimal; depends on nothing but the weights."""
    total = hashlib.sha256()
    for spec in specs:
        shape = ",".join(str(size) for size in spec.shape)
        total.update(f"{spec.name}\0{spec.dtype}\0{shape}\0{spec.digest}\n".encode())
    return total.hexdigest()


def checked(manifest: Manifest) -> Manifest:
    """The same manifest if it is consistent in itself; else InvalidInput."""
    check_specs(manifest.tensors)
    total = sum(spec.nbytes for spec in manifest.tensors)
    if total != manifest.bytes_total:
        way_out = f"the tensors sum to {total}"
        raise _bad("manifest.bytes_total", manifest.bytes_total, "wrong total", way_out)
    digest = weights_digest(manifest.tensors)
    if digest != manifest.digest:
        way_out = f"the entries hash to {digest}"
        raise _bad("manifest.digest", manifest.digest, "does not match the entries", way_out)
    return manifest


def check_specs(specs: Sequence[TensorSpec]) -> None:
    """Raise InvalidInput unless these could be the tensors of a model."""
    if not specs:
        raise _bad("manifest.tensors", "", "it names no tensor", "publish the whole model")
    for spec in specs:
        if spec.dtype not in _ITEM_BYTES:
            known = ", ".join(_ITEM_BYTES)
            raise _bad(f"{spec.name}.dtype", spec.dtype, "unknown dtype", f"one of {known}")
        if any(size < 0 for size in spec.shape):
            raise _bad(f"{spec.name}.shape", spec.shape, "a size is negative", "send real shapes")
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise _bad("manifest.tensors", twice, "named twice", "send each tensor once")


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


def layout(specs: Sequence[TensorSpec]) -> tuple[tuple[Slot, ...], int]:
    """Slot of every tensor in the stream, and the length of the stream in bytes."""
    slots, at = [], 0
    for spec in specs:
        slots.append(Slot(at, at + spec.nbytes))
        at = -(-(at + spec.nbytes) // ALIGN_BYTES) * ALIGN_BYTES
    return tuple(slots), at


def buckets(total: int, bucket_bytes: int) -> list[Slot]:
    """The stream cut into pieces of at most `bucket_bytes`; the same on every rank.

    Each is half of what is left, within bounds: there are few, for each costs the line some tenths
    of a millisecond, and little is left to verify when the last one is here.
    """
    least, at = min(_LEAST_BUCKET_BYTES, bucket_bytes), 0
    found = []
    while at < total:
        half = (total - at) // 2 // ALIGN_BYTES * ALIGN_BYTES
        end = min(at + min(max(half, least), bucket_bytes), total)
        found.append(Slot(at, end))
        at = end
    return found


def unpack(stream: Any, manifest: Manifest) -> dict[str, Any]:
    """Name → tensor views into `stream` (a flat uint8 tensor); no copy."""
    slots, _ = layout(manifest.tensors)
    return {
        spec.name: view(stream[slot.start : slot.end], spec)
        for spec, slot in zip(manifest.tensors, slots, strict=True)
    }


def view(piece: Any, spec: TensorSpec) -> Any:
    """A tensor's bytes as that tensor; no copy."""
    import torch

    return piece.view(getattr(torch, spec.dtype)).view(spec.shape)


class Arrived:
    """The bytes of one tensor that comes piece by piece."""

    def __init__(self) -> None:
        import xxhash

        self._hash = xxhash.xxh3_128()

    def add(self, piece: Any) -> None:
        """The next ones: a flat uint8 CPU tensor."""
        self._hash.update(piece.numpy())

    def wrong(self, spec: TensorSpec) -> str:
        """Empty if they have the digest of the manifest; else what is wrong, for people."""
        if self._hash.hexdigest() == spec.digest:
            return ""
        return f"{spec.name}: the bytes that arrived do not have the digest of the manifest"


def wrong_bytes(piece: Any, spec: TensorSpec) -> str:
    """`Arrived.wrong` of a tensor that is there as a whole."""
    arrived = Arrived()
    arrived.add(piece)
    return arrived.wrong(spec)


def check_finite(name: str, tensor: Any) -> None:
    """Raise InvalidInput unless every value is finite. Asked before weights leave the trainer:
    what arrives with the right digest is then finite too."""
    if tensor.is_floating_point() and not _finite(tensor):
        raise _bad(name, "", "has values that are not finite", "go back to the version before it")


def _finite(tensor: Any) -> bool:
    """A finite sum has finite terms; finite terms may overflow a sum, so look again then."""
    import torch

    values = tensor.float() if tensor.element_size() == 1 else tensor
    total = values.sum(dtype=torch.float32)
    return bool(torch.isfinite(total)) or bool(torch.isfinite(values).all())


def digest(piece: Any) -> str:
    """XXH3-128 of a flat uint8 CPU tensor, hexadecimal."""
    import xxhash

    return str(xxhash.xxh3_128_hexdigest(piece.numpy()))


def dtype_name(tensor: Any) -> str:
    """torch's word for the dtype, without the prefix."""
    return str(tensor.dtype).removeprefix("torch.")


def raw(tensor: Any) -> Any:
    """Its bytes: flat uint8 on the CPU."""
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _bad(field: str, value: object, problem: str, way_out: str) -> InvalidInput:
    return InvalidInput(problem, field=field, value=value, way_out=way_out)
