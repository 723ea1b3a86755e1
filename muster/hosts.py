"""What sandbox hosts tell of themselves: asked one by one, shown as a table.

Owns: the calls with their deadline, what a figure means, the table. Promise: every host is heard or
said to be silent within ASK_S; nothing is changed but by `set_capacity`. Does not cover: which
hosts there are (registry.py), the command line (cli/hosts.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from muster import rpc
from muster.errors import MusterError
from muster.registry import Entry
from muster.types import Value
from muster.v1 import sandbox_pb2 as pb
from muster.v1.sandbox_pb2_grpc import SandboxServiceStub
from muster.view import safe, share

if TYPE_CHECKING:
    from muster.v1.sandbox_pb2_grpc import SandboxServiceAsyncStub

ASK_S = 3.0
_SHOWN = ("start", "step", "verify")  # kinds of durations in the table; --json has all


class Times(Value, frozen=True):
    """Of the newest ones, in seconds."""

    count: int
    p50: float
    p90: float
    p99: float


class HostSeen(Value, frozen=True):
    """One host. `problem`: why it could not be asked; all else is then as its entry says.

    in_use, starting, warm, ending: boxes; waiting: callers without a place. acquired: boxes handed
    over since its service began, by how they came to be (COLD, FORK, WARM). load: as the kernel
    tells it, of 1, 5 and 15 minutes.
    """

    host: str
    address: str
    backend: str = ""
    boxes_max: int = 0
    starting_max: int = 0
    warm_max: int = 0
    in_use: int = 0
    starting: int = 0
    warm: int = 0
    ending: int = 0
    waiting: int = 0
    snapshots: int = 0
    snapshot_bytes: int = 0
    acquired: dict[str, int] = {}
    pool_hits: float | None = None  # share of WARM
    steps: int = 0
    verified: int = 0
    released: int = 0
    adopted: int = 0
    warm_dead: int = 0
    failures: dict[str, int] = {}
    seconds: dict[str, Times] = {}
    load: tuple[float, ...] = ()
    processors: int = 0
    memory_total_bytes: float = 0.0
    memory_available_bytes: float = 0.0
    problem: str = ""


async def ask(entries: Sequence[Entry]) -> list[HostSeen]:
    """What each of them tells, in their order."""
    async with asyncio.TaskGroup() as tasks:
        asking = [tasks.create_task(_one(entry), name=f"ask-{entry.id}") for entry in entries]
    return [task.result() for task in asking]


async def set_capacity(entry: Entry, boxes_max: int | None, warm_max: int | None = None) -> None:
    """Boxes that it may hold, boxes that may stand ready; None leaves a figure as it is."""
    request = pb.SetCapacityRequest(boxes_max=boxes_max, warm_max=warm_max)
    async with rpc.channel(entry.address) as channel:
        stub: SandboxServiceAsyncStub = SandboxServiceStub(channel)
        with rpc.calling(f"SetCapacity on {entry.id} at {entry.address}"):
            await stub.SetCapacity(request, timeout=ASK_S)


async def _one(entry: Entry) -> HostSeen:
    try:
        async with rpc.channel(entry.address) as channel:
            stub: SandboxServiceAsyncStub = SandboxServiceStub(channel)
            with rpc.calling(f"asking {entry.id}"):
                told = await stub.GetHostStatus(pb.GetHostStatusRequest(), timeout=ASK_S)
    except MusterError as error:
        backend = entry.info.get("backend", "")
        return HostSeen(entry.id, entry.address, backend, problem=error.problem)
    return seen(entry, told)


def seen(entry: Entry, told: pb.GetHostStatusResponse) -> HostSeen:
    """A host's answer."""
    acquired = dict(told.counts.acquired)
    total = sum(acquired.values())
    return HostSeen(
        host=told.host or entry.id,
        address=entry.address,
        backend=told.backend,
        boxes_max=told.capacity.boxes_max,
        starting_max=told.capacity.starting_max,
        warm_max=told.capacity.warm_max,
        in_use=told.boxes.in_use,
        starting=told.boxes.starting,
        warm=told.boxes.warm,
        ending=told.boxes.ending,
        waiting=told.boxes.waiting,
        snapshots=told.boxes.snapshots,
        snapshot_bytes=told.boxes.snapshot_bytes,
        acquired=acquired,
        pool_hits=acquired.get("WARM", 0) / total if total else None,
        steps=told.counts.steps,
        verified=told.counts.verified,
        released=told.counts.released,
        adopted=told.counts.adopted,
        warm_dead=told.counts.warm_dead,
        failures=dict(told.counts.failures),
        seconds={
            kind: Times(q.count, q.p50, q.p90, q.p99) for kind, q in told.counts.seconds.items()
        },
        load=tuple(told.load),
        processors=told.processors,
        memory_total_bytes=told.memory_total_bytes,
        memory_available_bytes=told.memory_available_bytes,
    )


def table(hosts: Sequence[HostSeen]) -> Table:
    """One row a host; times as p50/p99 in milliseconds."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("host", no_wrap=True)
    shown.add_column("address", no_wrap=True)
    shown.add_column("backend")
    heads = ("boxes", "starting", "warm", "waiting", "pool hits")
    for head in (*heads, *(f"{kind} ms" for kind in _SHOWN), "load"):
        shown.add_column(head, justify="right")
    for host in hosts:
        name, address, backend = safe(host.host), safe(host.address), safe(host.backend)
        if host.problem:
            shown.add_row(name, address, backend, safe(f"not asked: {host.problem}"))
            continue
        shown.add_row(
            name,
            address,
            backend,
            f"{host.in_use}/{host.boxes_max}",
            f"{host.starting}/{host.starting_max}",
            f"{host.warm}/{host.warm_max}",
            str(host.waiting),
            share(host.pool_hits),
            *(_times(host.seconds.get(kind)) for kind in _SHOWN),
            _load(host),
        )
    return shown


def _times(times: Times | None) -> str:
    if times is None or not times.count:
        return "–"
    return f"{times.p50 * 1000:.0f}/{times.p99 * 1000:.0f}"


def _load(host: HostSeen) -> str:
    return f"{host.load[0]:.1f} of {host.processors}" if host.load else "–"
