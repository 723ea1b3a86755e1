"""Which replicas of a run are to be sent a version.

Owns: `look`, `newest`. Promise: a replica that serves the version already is left alone, so
publishing again is free; one that does not answer is listed all the same: it may only have been
slow, and the publication fails it, and fences it. Does not cover: the transfer (publisher.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from muster import rpc
from muster.errors import MusterError
from muster.registry import Entry
from muster.v1 import inference_pb2 as pb
from muster.v1.inference_pb2_grpc import InferenceServiceStub

if TYPE_CHECKING:
    from muster.v1.inference_pb2_grpc import InferenceServiceAsyncStub

_SERVING = pb.REPLICA_STATE_SERVING
_TAKES_WEIGHTS = (_SERVING, pb.REPLICA_STATE_FENCED)


async def look(
    entries: Sequence[Entry], version: int, *, skip: Collection[str] = (), timeout_s: float
) -> tuple[list[tuple[str, str]], int, int]:
    """(id, address) of each listed replica that is to be sent `version`, how many serve it, and how
    many miss it and are left alone.

    skip: ids that are left alone; but not while another one serves the version and they say that
    they serve another: they are to take it, or be fenced. A replica that is starting or draining
    takes none. timeout_s: of each question.
    """
    states = await _ask(entries, timeout_s)
    serving = sum(_serves(at, version) for at in states)
    missing = [(e, at) for e, at in zip(entries, states, strict=True) if _misses(at, version)]
    stale = [
        (entry.id, entry.address)
        for entry, at in missing
        if entry.id not in skip or (serving and at is not None and at.state == _SERVING)
    ]
    return stale, serving, len(missing) - len(stale)


async def newest(entries: Sequence[Entry], *, timeout_s: float) -> int:
    """The highest version that any of them says it serves, 0 without any. timeout_s: see look."""
    return max((at.version for at in await _ask(entries, timeout_s) if at is not None), default=0)


async def _ask(
    entries: Sequence[Entry], timeout_s: float
) -> list[pb.GetReplicaStatusResponse | None]:
    async with asyncio.TaskGroup() as tasks:
        looks = [tasks.create_task(_look(entry, timeout_s), name=entry.id) for entry in entries]
    return [task.result() for task in looks]


def _serves(at: pb.GetReplicaStatusResponse | None, version: int) -> bool:
    return at is not None and at.version == version and at.state == _SERVING


def _misses(at: pb.GetReplicaStatusResponse | None, version: int) -> bool:
    """It does not serve the version, and may be able to take it."""
    return at is None or (at.state in _TAKES_WEIGHTS and not _serves(at, version))


async def _look(entry: Entry, timeout_s: float) -> pb.GetReplicaStatusResponse | None:
    """None: no answer. It may only be slow: the publication fails it, and fences it."""
    try:
        return await _status(entry, timeout_s)
    except MusterError:
        return None


async def _status(entry: Entry, timeout_s: float) -> pb.GetReplicaStatusResponse:
    async with rpc.channel(entry.address) as channel:
        stub: InferenceServiceAsyncStub = InferenceServiceStub(channel)
        with rpc.calling(f"status of {entry.id}"):
            return await stub.GetReplicaStatus(pb.GetReplicaStatusRequest(), timeout=timeout_s)
