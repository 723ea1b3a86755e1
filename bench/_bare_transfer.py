"""A bare gloo broadcast of a version's bytes: what publications are compared with.

Owns: both ends. The clock runs from joined ranks with memory at hand until the last receiver has
answered with one byte: nothing is verified, nothing is applied.
"""

from __future__ import annotations

import torch

from muster.clock import monotonic
from muster.transfer import group as transport


def broadcast(group: transport.WeightGroup, tensor: torch.Tensor, root: int) -> None:
    """torch's own, in one piece."""
    from torch.distributed.distributed_c10d import BroadcastOptions

    options = BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    group._group.broadcast([tensor], options).wait()


def receive_bare(spec: transport.GroupSpec, stream: torch.Tensor) -> None:
    """One byte from each receiver (it is ready), the stream from rank 0, one byte from each (it is
    here)."""
    group = transport.join(spec)
    for rank in range(1, spec.world_size):
        broadcast(group, torch.zeros(1, dtype=torch.uint8), rank)
    broadcast(group, stream, 0)
    for rank in range(1, spec.world_size):
        broadcast(group, torch.zeros(1, dtype=torch.uint8), rank)
    group.close()


def send_bare(spec: transport.GroupSpec, meeting: transport.Meeting, stream: torch.Tensor) -> float:
    """The trainer's end of it: from joined ranks until every receiver answered."""
    byte = torch.zeros(1, dtype=torch.uint8)
    group = transport.join(spec, store=meeting.store)
    for rank in range(1, spec.world_size):
        broadcast(group, byte, rank)
    began = monotonic()
    broadcast(group, stream, 0)
    for rank in range(1, spec.world_size):
        broadcast(group, byte, rank)
    seconds = monotonic() - began
    group.close()
    return seconds
