"""One policy version as it was when it was made: its bytes, copied once, and their manifest.

Owns: `Snapshot`. Promise: nothing that is trained afterwards changes it, so whoever joins late gets
the same bytes as the first; taking it reads each weight once, hashes it while it is warm, and
refuses values that are not finite. Memory: the size of the weights, on the CPU. Does not cover: how
long it is kept (its owner), how it travels (publisher.py, stored.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muster.transfer import manifest as weights
from muster.types import Value


class Snapshot(Value, frozen=True):
    """`stream`: flat uint8 tensor of the manifest's layout."""

    manifest: weights.Manifest
    stream: Any

    @classmethod
    def take(cls, state: Mapping[str, Any], *, version: int, parent: int) -> Snapshot:
        """Of `state` (name → torch tensor, any device), by name: whatever order it comes in, equal
        weights have an equal digest. Raises InvalidInput for a state that no engine could take.
        """
        import torch

        state = dict(sorted(state.items()))
        empty = tuple(
            weights.TensorSpec(name, tuple(t.shape), weights.dtype_name(t), "")
            for name, t in state.items()
        )
        weights.check_specs(empty)
        slots, total = weights.layout(empty)
        stream = torch.zeros(total, dtype=torch.uint8)
        specs = []
        for spec, slot in zip(empty, slots, strict=True):
            piece = stream[slot.start : slot.end]
            piece.copy_(weights.raw(state[spec.name]))
            weights.check_finite(spec.name, weights.view(piece, spec))
            specs.append(
                weights.TensorSpec(spec.name, spec.shape, spec.dtype, weights.digest(piece))
            )
        return cls(weights.of_specs(tuple(specs), version=version, parent=parent), stream)

    def renamed(self, version: int, parent: int) -> Snapshot:
        """The same bytes as another version."""
        specs = self.manifest.tensors
        return Snapshot(weights.of_specs(specs, version=version, parent=parent), self.stream)

    def tensors(self) -> dict[str, Any]:
        """Name → view into the stream; not to be written to."""
        return weights.unpack(self.stream, self.manifest)
