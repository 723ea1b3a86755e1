"""The process group that carries one publication.

Owns: opening, joining, broadcasting and ending a group of one trainer (rank 0) and its replicas.
Promise: every wait ends within the group's time limit; a group is used once (`generation` names it
and is never reused), and whatever goes wrong, the way on is a new group. Bytes cross as one flat
stream in packed buckets. `gloo` runs on CPUs; `nccl` is the same code path on GPUs and has
**not yet been run on hardware**.
Does not cover: what the bytes mean (manifest.py), who takes part (publisher.py).
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from muster.clock import monotonic
from muster.errors import InvalidInput, Unavailable
from muster.transfer.manifest import buckets
from muster.types import Value

BUCKET_BYTES = 128 << 20
PACED_BUCKET_BYTES = 8 << 20
"""Of a transfer that must not take the whole line: it goes out in small bursts."""
BACKENDS = ("gloo", "nccl")
_HANG_UPS, _HANG_UP_S = 10, 0.2
_POLL_S = 0.001  # nccl, for the end of a bucket
_LEAST_S = 0.01  # limits are whole milliseconds, and 0 would be none


class GroupSpec(Value, frozen=True):
    """One membership. `timeout_s` bounds joining and every broadcast, from when it is read;
    `bucket_bytes` is the longest piece that the stream is cut into: ranks that differ would tear
    it."""

    backend: str
    host: str
    port: int
    rank: int
    world_size: int
    generation: str
    timeout_s: float
    bucket_bytes: int = BUCKET_BYTES


class Meeting:
    """The trainer's end of a group before anybody joined: a bound port where ranks meet.

    The socket is bound first and handed over, so no other process can take the port in between,
    and it listens on `host` alone. The store serves without waiting for anyone.
    """

    def __init__(self, host: str, world_size: int, *, timeout_s: float):
        from torch.distributed import TCPStore

        try:
            listener = socket.create_server((host, 0), backlog=max(16, world_size))
        except OSError as error:
            raise InvalidInput(
                f"cannot listen there: {error}",
                field="transfer.host",
                value=host,
                way_out="give an address of this machine that the replicas can reach",
            ) from error
        self.host, self.port = host, int(listener.getsockname()[1])
        self.store = TCPStore(
            host,
            self.port,
            world_size,
            is_master=True,
            timeout=datetime.timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


class WeightGroup:
    """A joined group. Not safe to use from two threads."""

    def __init__(self, spec: GroupSpec, process_group: Any, store: Any):
        self.spec, self._group, self._store = spec, process_group, store

    def broadcast(
        self, stream: Any, passed: Callable[[int], None] | None = None, *, ahead: int = 1
    ) -> None:
        """Send (rank 0) or fill (others) `stream`: flat, uint8, of one length everywhere.

        Blocks; raises Unavailable when a rank is lost or the time limit passes. passed: told after
        each bucket how many bytes are through. ahead: so many of the following buckets are under
        way meanwhile, else the line is idle until both ends have come around.
        """
        from torch.distributed.distributed_c10d import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        ends = monotonic() + self.spec.timeout_s
        under_way: deque[tuple[Any, int]] = deque()
        try:
            for slot in buckets(stream.numel(), self.spec.bucket_bytes):
                options.timeout = _left(ends)
                work = self._group.broadcast([stream[slot.start : slot.end]], options)
                under_way.append((work, slot.end))
                if len(under_way) > ahead:
                    self._wait(*under_way.popleft(), ends, passed)
            while under_way:
                self._wait(*under_way.popleft(), ends, passed)
        except RuntimeError as error:
            raise Unavailable(
                f"the transfer broke off: {_first_line(error)}",
                field="transfer.generation",
                value=self.spec.generation,
                way_out="publish again; a new group is made",
            ) from error

    def _wait(
        self, work: Any, upto: int, ends: float, passed: Callable[[int], None] | None
    ) -> None:
        work.wait()
        if self.spec.backend == "nccl":
            _through(work, ends)
        if passed is not None:
            passed(upto)

    def close(self) -> None:
        """End the membership; for nccl a hanging collective is aborted.

        Taking gloo's connections down takes 20 ms, for which nobody waits. (The interpreter does,
        at its exit: a daemon in there would abort it.)
        """
        last = [self._group, self._store]
        self._group = self._store = None
        if self.spec.backend == "nccl":
            abort = getattr(last[0], "abort", None)
            if abort is not None:
                abort()
        else:  # no name of this frame holds what the thread is to let go
            name = f"close-{self.spec.generation}"
            threading.Thread(target=last.clear, name=name, daemon=False).start()


def _through(work: Any, ends: float) -> None:
    """nccl's `wait` makes the device wait, not the caller: whoever closed the group now would cut
    off what is on its way, and whoever looked at the bytes would see old ones."""
    while not work.is_completed():
        time.sleep(min(_POLL_S, _left(ends).total_seconds()))


def _left(ends: float) -> datetime.timedelta:
    """Of the limit for all buckets together: none of a transfer that crawls need ever be late."""
    left = ends - monotonic()
    if left <= 0:
        raise RuntimeError("it was not through when its time was over")
    return datetime.timedelta(seconds=max(left, _LEAST_S))


def ahead_s(sent: int, seconds: float, bytes_per_s: float) -> float:
    """How long to wait after `sent` bytes in so many seconds, to keep to that rate."""
    return max(0.0, sent / bytes_per_s - seconds)


def join(spec: GroupSpec, *, store: Any = None) -> WeightGroup:
    """Join the group; blocks until all ranks are there or `timeout_s` passed (Unavailable).

    store: the trainer gives its Meeting's; replicas connect to host and port.
    """
    from torch.distributed import PrefixStore

    if spec.backend not in BACKENDS:
        raise InvalidInput(
            "unknown transport",
            field="transfer.backend",
            value=spec.backend,
            way_out=f"one of {', '.join(BACKENDS)}",
        )
    limit = datetime.timedelta(seconds=spec.timeout_s)
    try:
        store = store or _connected(spec, limit)
        meeting = PrefixStore(spec.generation, store)
        made = (
            _gloo(spec, meeting, limit) if spec.backend == "gloo" else _nccl(spec, meeting, limit)
        )
    except RuntimeError as error:
        raise Unavailable(
            f"the transfer group did not come together: {_first_line(error)}",
            field="transfer.generation",
            value=spec.generation,
            way_out="check that trainer and replicas reach each other, then publish again",
        ) from error
    return WeightGroup(spec, made, store)


def _connected(spec: GroupSpec, limit: datetime.timedelta) -> Any:
    """A store of the trainer's. RuntimeError when it does not answer in time.

    TCPStore greets its server without a time limit, so a peer that accepts and says nothing would
    hold the caller for ever. So the greeting is left to a thread, and at the limit its connection
    is shut down under it. (A thread left in there would abort the interpreter at its exit.)
    """
    from torch.distributed import TCPStore

    made: list[Any] = []

    def connect() -> None:
        try:
            store = TCPStore(
                spec.host,
                spec.port,
                spec.world_size,
                is_master=False,
                timeout=limit,
                wait_for_workers=False,
            )
            made.append(store)
        except RuntimeError as error:
            made.append(error)

    thread = threading.Thread(target=connect, name=f"join-{spec.generation}", daemon=True)
    thread.start()
    thread.join(limit.total_seconds())
    for _ in range(_HANG_UPS):  # it may have dialled once more meanwhile
        if not thread.is_alive():
            break
        _hang_up(spec.host, spec.port)
        thread.join(_HANG_UP_S)
    found = made[0] if made else RuntimeError(f"{spec.host}:{spec.port} does not answer")
    if isinstance(found, RuntimeError):
        if "recv" in str(found):  # what the store says of a connection that was shut down
            raise RuntimeError(f"{spec.host}:{spec.port} does not answer") from found
        raise found
    return found


def _hang_up(host: str, port: int) -> None:
    """Shut down this process's connections to a meeting: its port is that of one group alone."""
    hosts = {info[4][0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    for name in os.listdir("/proc/self/fd"):
        try:
            copy = os.dup(int(name))
        except OSError:
            continue  # closed meanwhile
        try:
            connection = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)  # not a socket
            continue
        with connection:
            if _peer(connection) in {(address, port) for address in hosts}:
                connection.shutdown(socket.SHUT_RDWR)


def _peer(connection: socket.socket) -> tuple[str, int] | None:
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        host, port = connection.getpeername()[:2]
    except OSError:
        return None  # not connected
    return str(host).removeprefix("::ffff:"), int(port)


def _gloo(spec: GroupSpec, store: Any, limit: datetime.timedelta) -> Any:
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()
    options._timeout = limit
    # The default device follows the host name, which need not be an address others can reach.
    local = _local_address(spec.host, spec.port)
    options._devices = [ProcessGroupGloo.create_device(hostname=local)]
    return ProcessGroupGloo(store, spec.rank, spec.world_size, options)


def _nccl(spec: GroupSpec, store: Any, limit: datetime.timedelta) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = limit
    return ProcessGroupNCCL(store, spec.rank, spec.world_size, options)


def _local_address(host: str, port: int) -> str:
    """The address of this machine from which `host` is reached."""
    try:
        if ipaddress.ip_address(host).is_loopback:
            return host
    except ValueError:
        pass  # a name: ask the routing table below
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        return str(probe.getsockname()[0])


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:300]
