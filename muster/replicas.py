"""What inference replicas tell of themselves: asked one by one, shown as a table.

Owns: the calls with their deadline, the table. Promise: every replica is heard or said to be silent
within ASK_S; nothing is changed; replicas whose figures cannot be compared are told apart. Does not
cover: which replicas there are (registry.py), the command line (cli/hosts.py).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from muster import rpc
from muster.errors import MusterError
from muster.fingerprint import ServingFingerprint, differences, fingerprint_from_pb, text
from muster.registry import Entry
from muster.types import Value
from muster.v1 import inference_pb2 as pb
from muster.v1.inference_pb2_grpc import InferenceServiceStub
from muster.view import safe

if TYPE_CHECKING:
    from muster.v1.inference_pb2_grpc import InferenceServiceAsyncStub

ASK_S = 3.0


class ReplicaSeen(Value, frozen=True):
    """One replica. `problem`: why it could not be asked; all else is then as its entry says."""

    replica: str
    address: str
    state: str = ""
    version: int = 0
    running: int = 0
    waiting: int = 0
    kv_tokens_used: int = 0
    kv_tokens_total: int = 0
    tokens_generated: int = 0
    experts_dropped: int = 0
    serving: ServingFingerprint = ServingFingerprint()
    problem: str = ""


async def ask(entries: Sequence[Entry]) -> list[ReplicaSeen]:
    """What each of them tells, in their order."""
    async with asyncio.TaskGroup() as tasks:
        asking = [tasks.create_task(_one(entry), name=f"ask-{entry.id}") for entry in entries]
    return [task.result() for task in asking]


async def _one(entry: Entry) -> ReplicaSeen:
    try:
        async with rpc.channel(entry.address) as channel:
            stub: InferenceServiceAsyncStub = InferenceServiceStub(channel)
            with rpc.calling(f"asking {entry.id}"):
                told = await stub.GetReplicaStatus(pb.GetReplicaStatusRequest(), timeout=ASK_S)
    except MusterError as error:
        return ReplicaSeen(entry.id, entry.address, problem=error.problem)
    return seen(entry, told)


def seen(entry: Entry, told: pb.GetReplicaStatusResponse) -> ReplicaSeen:
    """A replica's answer."""
    return ReplicaSeen(
        replica=told.replica or entry.id,
        address=entry.address,
        state=_state(told.state),
        version=told.version,
        running=told.running,
        waiting=told.waiting,
        kv_tokens_used=told.kv_tokens_used,
        kv_tokens_total=told.kv_tokens_total,
        tokens_generated=told.tokens_generated,
        experts_dropped=told.experts_dropped,
        serving=fingerprint_from_pb(told.serving),
    )


def _state(number: pb.ReplicaState.ValueType) -> str:
    try:
        return pb.ReplicaState.Name(number).removeprefix("REPLICA_STATE_").lower()
    except ValueError:
        return str(number)


def table(replicas: Sequence[ReplicaSeen]) -> Table:
    """One row a replica."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("replica", no_wrap=True)
    shown.add_column("address", no_wrap=True)
    shown.add_column("state")
    for head in ("version", "running", "waiting", "KV tokens", "sampled"):
        shown.add_column(head, justify="right")
    for replica in replicas:
        name, address = safe(replica.replica), safe(replica.address)
        if replica.problem:
            shown.add_row(name, address, safe(f"not asked: {replica.problem}"))
            continue
        shown.add_row(
            name,
            address,
            replica.state,
            str(replica.version),
            str(replica.running),
            str(replica.waiting),
            f"{replica.kv_tokens_used}/{replica.kv_tokens_total}",
            str(replica.tokens_generated),
        )
    return shown


def served_with(replicas: Sequence[ReplicaSeen]) -> list[str]:
    """What most of them serve with; then each that differs, and in what."""
    heard = [replica for replica in replicas if not replica.problem]
    if not heard:
        return []
    usual = Counter(replica.serving for replica in heard).most_common(1)[0][0]
    lines = [f"They serve with: {text(usual)}"]
    for replica in heard:
        if found := differences(usual, replica.serving):
            lines.append(f"{replica.replica} differs: {'; '.join(found)}")
    return lines
