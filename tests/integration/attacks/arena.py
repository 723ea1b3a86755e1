"""Where attacks are tried: boxes with all defences or without some, and a host to be attacked.

The host's side (servers, a socket, shared memory, a file with a token) lies in a network namespace
of its own, in which the boxes' keepers are started too: without its network defence a box stands
in that namespace, not in this machine's.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import secrets
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from muster.types import Limits
from services.sandbox.adapters.native import syscalls as sc
from services.sandbox.adapters.native.backend import NativeBackend, open_native
from services.sandbox.adapters.native.spawn import DEFENCES
from services.sandbox.box import BoxFailure, Evidence
from tests.integration.attacks.attempt import Attack

ENV = {"PATH": "/usr/bin:/bin", "HOME": "/root"}
LIMITS = Limits(memory_bytes=128 << 20, pids=64, disk_bytes=32 << 20, disk_inodes=4096)
_STEP_S = 20.0
_GREETING = b"hello\n"
_METADATA = "169.254.169.254"


class Arena:
    """Of one run of the tests; `filled` replaces the words in the bodies of attacks."""

    def __init__(self, folder: Path, filled: dict[str, str], stack: AsyncExitStack):
        self.filled = filled
        self._folder, self._stack = folder, stack
        self._backends: dict[frozenset[str], NativeBackend] = {}
        self._boxes = 0

    async def attempt(self, attack: Attack, without: frozenset[str] = frozenset()) -> str:
        """Try it in a fresh box with all defences but these; empty when it succeeded, else why."""
        backend = await self._backend(without)
        async with self._box(backend) as box:
            try:
                found = await backend.run(box, attack.command(self.filled), _STEP_S)
            except BoxFailure as failure:
                return "" if attack.lethal else f"the box is gone: {failure}"
        if attack.lethal:
            return f"the box lives on: {said(found)}"
        return "" if found.exit_code == 0 else said(found) or f"exit code {found.exit_code}"

    async def _backend(self, without: frozenset[str]) -> NativeBackend:
        if without not in self._backends:
            opened = open_native(self._folder / secrets.token_hex(4), defences=DEFENCES - without)
            backend = self._backends[without] = await self._stack.enter_async_context(opened)
            await self._settle_neighbour(backend)
        return self._backends[without]

    async def _settle_neighbour(self, backend: NativeBackend) -> None:
        """A second box, with a process and a file that no other box may reach."""
        await backend.start("neighbour", LIMITS)
        await backend.set_session("neighbour", "/app", dict(ENV))
        name = self.filled["NEIGHBOUR"]
        live = f"touch {name}; for i in 1 2 3; do (exec -a {name} sleep 600) & done"
        assert (await backend.run("neighbour", live, _STEP_S)).exit_code == 0

    @asynccontextmanager
    async def _box(self, backend: NativeBackend) -> AsyncIterator[str]:
        self._boxes += 1
        box = f"b{self._boxes}"
        await backend.start(box, LIMITS)
        try:
            await backend.set_session(box, "/app", dict(ENV))
            yield box
        finally:
            await backend.end(box)


def said(found: Evidence) -> str:
    """The last line that an attempt printed."""
    return (found.head + found.tail).decode("utf-8", "replace").strip().rpartition("\n")[2]


@asynccontextmanager
async def open_arena(folder: Path) -> AsyncIterator[Arena]:
    """An arena below `folder`, which everybody on the host may enter."""
    async with AsyncExitStack() as stack:
        stack.enter_context(_network_apart())
        yield Arena(folder, await open_host(folder, stack, _METADATA), stack)


async def open_host(folder: Path, stack: AsyncExitStack, metadata: str = "") -> dict[str, str]:
    """What is there to be attacked, until `stack` closes, and the words that name it.

    metadata: an address of this network namespace to serve on port 80; empty: none.
    """
    token = f"t{secrets.token_hex(6)}"
    (folder / "token").write_text(token)
    shared = stack.enter_context(_shared_memory())
    port = await _serve(stack, folder / "socket", token, metadata)
    return {
        "TOKEN": token,
        "NEIGHBOUR": f"n{token}",
        "FILE": str(folder / "token"),
        "SOCKET": str(folder / "socket"),
        "SHARED": str(shared),
        "DISK": _disk(),
        "HIERARCHY": _hierarchy(),
        "PORT": port,
    }


@contextmanager
def _network_apart() -> Iterator[None]:
    """This process in a network namespace of its own, with the cloud's address on it."""
    before = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        sc.unshare(sc.CLONE_NEWNET)
        try:
            sc.loopback_up()
            subprocess.run(["ip", "address", "add", f"{_METADATA}/32", "dev", "lo"], check=True)
            yield
        finally:
            sc.setns(before, sc.CLONE_NEWNET)
    finally:
        os.close(before)


@contextmanager
def _shared_memory() -> Iterator[int]:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    key = secrets.randbelow(1 << 30) + 1
    number = libc.shmget(key, 4096, 0o1600)
    assert number >= 0, os.strerror(ctypes.get_errno())
    at = libc.shmat(number, None, 0)
    ctypes.memmove(at, b"host", 4)
    libc.shmdt(ctypes.c_void_p(at))
    try:
        yield key
    finally:
        libc.shmctl(number, 0, None)


async def _serve(stack: AsyncExitStack, path: Path, name: str, metadata: str) -> str:
    """Servers that greet: on the addresses, at a path and under an abstract name."""

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(_GREETING)
        writer.close()

    local = await asyncio.start_server(greet, "127.0.0.1", 0)
    if metadata:
        await stack.enter_async_context(await asyncio.start_server(greet, metadata, 80))
    for server in (
        local,
        await asyncio.start_unix_server(greet, path),
        await asyncio.start_unix_server(greet, f"\0{name}"),
    ):
        await stack.enter_async_context(server)
    return str(local.sockets[0].getsockname()[1])


def _disk() -> str:
    """`major, minor` of a disk that this process may open; else of a loop device, bound or not."""
    for line in Path("/proc/partitions").read_text("utf-8").split("\n")[2:]:
        if line and os.access(f"/dev/{line.split()[3]}", os.R_OK):
            try:
                os.close(os.open(f"/dev/{line.split()[3]}", os.O_RDONLY | os.O_NONBLOCK))
            except OSError:
                continue
            return ", ".join(line.split()[:2])
    return "7, 0"


def _hierarchy() -> str:
    """A v1 hierarchy that is mounted here already."""
    for line in Path("/proc/mounts").read_text("utf-8").splitlines():
        _, where, kind, *_ = line.split()
        if kind == "cgroup":
            return Path(where).name
    return "pids"
