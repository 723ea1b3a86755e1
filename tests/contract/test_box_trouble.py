"""What goes wrong with one box, or takes longer than usual, and costs the host and others nothing.

On the fake, made slow or broken at one place; what a backend promises is told in test_box.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from muster.errors import Exhausted, MusterError, NotFound, Refused, Unavailable
from services.sandbox.adapters import archives
from services.sandbox.adapters.callers import Made
from services.sandbox.adapters.fake import FakeBackend, open_fake
from services.sandbox.box import CopiedFile, Evidence, Snapshot
from services.sandbox.config import SandboxConfig
from services.sandbox.driver import SandboxHost
from tests.contract.hosts import DOCKERFILE, KEY, acquire, key, step

SETUP = DOCKERFILE + "RUN echo made >> /job/made\n"
COLD = SandboxConfig(boxes_max=6, warm_max=0)
TWIN = key(sibling=1)
FILE = archives.write([CopiedFile("a", data=b"x")])


class Slow(FakeBackend):
    """What is named in `slow` waits in the middle until the test says `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.slow: set[str] = set()
        self.began, self.go = asyncio.Event(), asyncio.Event()
        self.copied = 0  # snapshots of boxes that went on

    async def _pause(self, what: str) -> None:
        if what in self.slow:
            self.began.set()
            await self.go.wait()

    async def run(self, box: str, command: str, timeout_s: float, turn: int = -1) -> Evidence:
        await self._pause("run")
        return await super().run(box, command, timeout_s, turn)

    async def copy_in(self, box: str, folder: str, files: tuple[CopiedFile, ...]) -> None:
        await self._pause("copy_in")
        await super().copy_in(box, folder, files)

    async def copy_out(self, box: str, path: str, bytes_max: int) -> tuple[CopiedFile, ...]:
        await self._pause("copy_out")
        return await super().copy_out(box, path, bytes_max)

    async def snapshot(self, box: str, layer: str, *, keep: bool) -> Snapshot:
        told = await super().snapshot(box, layer, keep=keep)
        self.copied += keep
        await self._pause("snapshot")
        return told

    async def end(self, box: str) -> bool:
        await self._pause("end")
        return await super().end(box)


@pytest.fixture
def backend() -> Slow:
    return Slow()


async def refusal(call: Awaitable[object]) -> MusterError:
    with pytest.raises(MusterError) as caught:
        await call
    return caught.value


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110 - nobody is told of it
            await asyncio.sleep(0.01)


# One box is not the host -----------------------------------------------------------------------


async def used(host: SandboxHost) -> None:
    """A box that comes to every call of a backend, but for those of warm ones."""
    box = (await acquire(host, dockerfile=SETUP)).box
    await step(host, box, 0, "echo one > kept")
    await host.copy_in(KEY, box, "/job", FILE)
    await host.copy_out(KEY, box, "/job/kept")
    twin = (await host.fork(KEY, box, TWIN, 5.0, after=0)).box
    await host.verify(KEY, box)
    await host.release(KEY, box)
    await host.release(TWIN, twin)


CALLS = (
    *("start", "set_session", "put", "snapshot", "note", "run", "seal", "judge"),
    *("copy_in", "copy_out", "end", "drop"),
)


def breaking(backend: FakeBackend, call: str, patch: pytest.MonkeyPatch) -> list[object]:
    """What the call is asked for from now on; it raises what nobody expects."""
    asked: list[object] = []

    async def broken(*what: object, **how: object) -> None:
        asked.append((what, how))
        raise UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed")

    patch.setattr(backend, call, broken)
    return asked


@pytest.mark.parametrize("call", CALLS)
async def test_whatever_a_backend_raises_for_one_box_the_host_goes_on(
    call: str, backend: Slow
) -> None:
    async with SandboxHost(backend, COLD, "host") as host:
        with pytest.MonkeyPatch.context() as patch:
            asked = breaking(backend, call, patch)
            with contextlib.suppress(Unavailable, NotFound):
                await used(host)
            await until(lambda: bool(asked))
        assert sum(host.status().counts.failures.values()) > 0
        other = key(group="after")
        box = (await acquire(host, other, dockerfile=SETUP)).box
        assert await step(host, box, 0, "cat made", episode=other) == "made\n"


@pytest.mark.parametrize("call", ["start", "set_session", "alive", "note"])
async def test_whatever_a_backend_raises_for_a_warm_box_the_host_goes_on(
    call: str, backend: Slow
) -> None:
    async with SandboxHost(backend, SandboxConfig(boxes_max=6, warm_max=1), "host") as host:
        await acquire(host, dockerfile=SETUP)
        await until(lambda: "warm" in host.status().states)
        with pytest.MonkeyPatch.context() as patch:
            asked = breaking(backend, call, patch)
            with contextlib.suppress(Unavailable):
                await acquire(host, key(group="g2"), dockerfile=SETUP)
            await until(lambda: bool(asked))
        await acquire(host, key(group="g3"), dockerfile=SETUP)


async def test_a_variable_that_is_no_text_goes_into_a_fork_and_ends_no_host(backend: Slow) -> None:
    async with SandboxHost(backend, COLD, "host") as host:
        box = (await acquire(host)).box
        backend._boxes[box].shell.env["X"] = "\udcff"
        twin = (await host.fork(KEY, box, TWIN, 5.0, after=-1)).box
        assert backend._boxes[twin].shell.env["X"] == "\udcff"
        await host.fork(TWIN, twin, key(sibling=2), 5.0, after=-1)
        assert await step(host, box, 0, "echo on") == "on\n"
        assert host.status().counts.failures == {}  # such as a note


async def test_a_note_that_cannot_be_kept_is_no_doubt_about_box_or_snapshot(backend: Slow) -> None:
    async with SandboxHost(backend, COLD, "host") as host:
        await acquire(host, dockerfile=SETUP)
        backend.fail_notes = 4
        for sibling in range(1, 5):
            got = await acquire(host, key(sibling=sibling), dockerfile=SETUP)
            assert got.made is Made.FORK
        assert host.status().counts.failures == {"note": 4}


async def test_a_box_that_could_not_be_ended_is_nobody_s_after_a_restart(backend: Slow) -> None:
    async with SandboxHost(backend, COLD, "host") as former:
        old = (await acquire(former)).box
        backend.fail_ends = 3
        await former.release(KEY, old)
        assert backend.running == [old]
    async with SandboxHost(backend, COLD, "host") as host:
        assert (backend.running, host.status().counts.adopted) == ([], 0)


# Beside each other -----------------------------------------------------------------------------


@pytest.mark.parametrize("copy", ["copy_in", "copy_out", "snapshot"])
async def test_while_a_box_is_copied_nothing_else_runs_in_it(copy: str, backend: Slow) -> None:
    async with SandboxHost(backend, COLD, "host") as host, asyncio.TaskGroup() as tasks:
        box = (await acquire(host)).box
        copies: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
            "copy_in": lambda: host.copy_in(KEY, box, "/job", FILE),
            "copy_out": lambda: host.copy_out(KEY, box, "/job/data"),
            "snapshot": lambda: host.fork(KEY, box, TWIN, 20.0, after=None),
        }
        backend.slow = {copy}
        copying = tasks.create_task(copies[copy]())
        await backend.began.wait()
        calls = [copies[other]() for other in ("copy_in", "copy_out")]
        calls.append(host.fork(KEY, box, key(sibling=2), 20.0, after=None))
        calls += [host.execute(KEY, box, 0, "echo one", 10), host.verify(KEY, box)]
        for call in calls:
            assert isinstance(await refusal(call), Refused)
        backend.go.set()
        await copying
        assert await step(host, box, 0, "echo one") == "one\n"


@pytest.mark.parametrize("slow", ["run", "copy_in", "snapshot"])
async def test_a_box_in_which_something_runs_is_not_idle(slow: str, backend: Slow) -> None:
    config = SandboxConfig(warm_max=0, idle_s=0.3)
    async with SandboxHost(backend, config, "host") as host, asyncio.TaskGroup() as tasks:
        box = (await acquire(host)).box
        calls: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
            "run": lambda: host.execute(KEY, box, 0, "echo one", 10),
            "copy_in": lambda: host.copy_in(KEY, box, "/job", FILE),
            "snapshot": lambda: host.fork(KEY, box, TWIN, 20.0, after=None),
        }
        idle = (await acquire(host, key(sibling=2))).box
        backend.slow = {slow}
        running = tasks.create_task(calls[slow]())
        await backend.began.wait()
        await until(lambda: idle not in backend.running)
        assert box in backend.running
        backend.go.set()
        await running
        await until(lambda: box not in backend.running)


async def test_one_that_waits_for_the_end_of_a_box_hears_that_the_host_stops(backend: Slow) -> None:
    backend.slow = {"end"}
    async with asyncio.timeout(10), SandboxHost(backend, COLD, "host") as host:
        released, replaced = (await acquire(host)).box, await acquire(host, TWIN)
        await step(host, replaced.box, 0, "true", episode=TWIN)
        async with asyncio.TaskGroup() as tasks:
            calls = [
                tasks.create_task(refusal(host.release(KEY, released))),
                tasks.create_task(refusal(acquire(host, TWIN, fresh=True))),
            ]
            await backend.began.wait()
            await asyncio.sleep(0)
            host.stop()
        assert all(isinstance(call.result(), Unavailable) for call in calls)


async def test_a_set_up_is_told_to_the_one_for_whom_it_ran_beside_a_fork(backend: Slow) -> None:
    async with SandboxHost(backend, COLD, "host") as host, asyncio.TaskGroup() as tasks:
        box = (await acquire(host, dockerfile=SETUP)).box
        await doubted(host, backend)
        backend.slow = {"snapshot"}
        fork = tasks.create_task(host.fork(KEY, box, TWIN, 20.0, after=None))
        await backend.began.wait()
        cold = tasks.create_task(acquire(host, key(sibling=2), dockerfile=SETUP))
        await asyncio.sleep(0)
        backend.go.set()
        assert ((await fork).made, (await cold).made) == (Made.FORK, Made.COLD)


async def doubted(host: SandboxHost, backend: FakeBackend) -> None:
    """The host gives up the snapshot of the set-up."""
    backend.fail_starts = 3
    for sibling in (7, 8, 9):
        await refusal(acquire(host, key(sibling=sibling), dockerfile=SETUP))


async def test_a_set_up_is_told_to_the_one_for_whom_it_ran_beside_a_box_taken_over(
    backend: Slow,
) -> None:
    async with SandboxHost(backend, COLD, "host") as former:
        await acquire(former, dockerfile=SETUP)
    async with SandboxHost(backend, COLD, "host") as host:
        await doubted(host, backend)
        assert (await acquire(host, TWIN, dockerfile=SETUP)).made is Made.COLD


# Snapshots -------------------------------------------------------------------------------------


async def test_forks_leave_no_more_snapshots_than_the_bounds_allow(backend: Slow) -> None:
    config = SandboxConfig(boxes_max=8, warm_max=0, snapshots_max=3)
    async with SandboxHost(backend, config, "host") as host:
        box = (await acquire(host)).box
        for sibling in (1, 2):
            await host.fork(KEY, box, key(sibling=sibling), 5.0, after=None)
        error = await refusal(host.fork(KEY, box, key(sibling=3), 5.0, after=None))
        assert isinstance(error, Exhausted)
        assert (error.field, backend.copied) == ("sandbox.snapshots_max", 2)
        await host.release(key(sibling=1), await name(host, 1))
        await host.fork(KEY, box, key(sibling=3), 5.0, after=None)


async def name(host: SandboxHost, sibling: int) -> str:
    living = {one.key.sibling: one.box for one in await host.claim("run", KEY.owner_epoch)}
    return living[sibling]


async def test_a_fork_that_is_larger_than_the_bounds_is_refused_and_leaves_nothing(
    backend: Slow,
) -> None:
    config = SandboxConfig(warm_max=0, snapshot_bytes_max=1 << 20)
    async with SandboxHost(backend, config, "host") as host:
        box = (await acquire(host)).box
        backend._boxes[box].shell.files["/job/big"] = bytes(2 << 20)
        error = await refusal(host.fork(KEY, box, TWIN, 5.0, after=None))
        assert isinstance(error, Exhausted)
        assert error.field == "sandbox.snapshot_bytes_max"
        await until(lambda: len(backend.layers) == 1)  # the set-up's
        assert await step(host, box, 0, "echo on") == "on\n"


async def test_boxes_are_copied_few_at_a_time(backend: Slow) -> None:
    config = SandboxConfig(boxes_max=8, warm_max=0, copying_max=1)
    async with SandboxHost(backend, config, "host") as host, asyncio.TaskGroup() as tasks:
        names = [(await acquire(host, key(sibling=n))).box for n in range(3)]
        backend.slow = {"snapshot"}
        forks = [
            tasks.create_task(host.fork(key(sibling=n), box, key(sibling=n + 4), 5.0, after=None))
            for n, box in enumerate(names)
        ]
        await backend.began.wait()
        await asyncio.sleep(0)
        assert len(backend.layers) == 2  # the set-up's, and one of three
        backend.go.set()
        assert len({(await fork).box for fork in forks}) == 3


async def test_a_squashed_fork_keeps_its_set_up_and_all_go_in_the_end(backend: Slow) -> None:
    config = SandboxConfig(boxes_max=8, warm_max=0, squash_depth=2)
    async with SandboxHost(backend, config, "host") as host:
        box, episode = (await acquire(host, dockerfile=SETUP)).box, KEY
        for sibling in (1, 2):
            into = key(sibling=sibling)
            twin = (await host.fork(episode, box, into, 5.0, after=None)).box
            await host.release(episode, box)
            box, episode = twin, into
        await until(lambda: len(backend.layers) == 2)  # the set-up's, and the squashed one
    async with SandboxHost(backend, config, "host") as host:
        await doubted(host, backend)
        assert len(backend.layers) == 2
        await host.release(episode, box)
        await until(lambda: backend.layers == [])
        assert "drop" not in host.status().counts.failures


async def test_what_a_fork_stands_on_stays_though_its_box_ended_meanwhile(backend: Slow) -> None:
    async with SandboxHost(backend, COLD, "host") as host, asyncio.TaskGroup() as tasks:
        box = (await acquire(host, dockerfile=SETUP)).box
        backend.slow = {"snapshot"}
        fork = tasks.create_task(host.fork(KEY, box, TWIN, 20.0, after=None))
        await backend.began.wait()
        await host.release(KEY, box)
        await doubted(host, backend)
        backend.go.set()
        await host.release(TWIN, (await fork).box)
        await until(lambda: backend.layers == [])
        assert "drop" not in host.status().counts.failures


async def test_what_was_built_goes_when_there_is_more_and_is_built_again() -> None:
    config = SandboxConfig(warm_max=0, snapshots_max=2)
    async with open_fake(builds=True) as backend, SandboxHost(backend, config, "host") as host:
        for number in range(4):
            got = await acquire(host, dockerfile=f"{SETUP}RUN echo {number}\n")
            assert got.made is Made.COLD
            await host.release(KEY, got.box)
        await until(lambda: len(backend.layers) == 2)
        assert (await acquire(host, dockerfile=f"{SETUP}RUN echo 3\n")).made is Made.FORK
        again = await acquire(host, TWIN, dockerfile=f"{SETUP}RUN echo 0\n")
        assert (again.made, backend.built) == (Made.COLD, 5)
        assert host.status().counts.failures == {}
