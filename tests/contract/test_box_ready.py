"""Boxes that are ready or forked, copies, capacity: a host's calls on the fake and real boxes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from muster.errors import Fenced, InvalidInput, MusterError, NotFound, Refused, Unavailable
from services.sandbox.adapters import archives
from services.sandbox.adapters.callers import Made
from services.sandbox.adapters.fake import open_fake
from services.sandbox.box import Backend, CopiedFile
from services.sandbox.config import SandboxConfig
from services.sandbox.driver import SandboxHost
from tests.contract import backends
from tests.contract.hosts import DOCKERFILE, KEY, acquire, key, step

NEWER = key(owner_epoch=6)
SETUP = DOCKERFILE + "RUN echo made >> /job/made\n"
COLD = SandboxConfig(boxes_max=6, warm_max=0)
WARM = SandboxConfig(boxes_max=6, warm_max=2)
REWARD = "cat /job/kept > /logs/verifier/reward.txt"


@pytest.fixture(params=backends.ALL)
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Backend]:
    async with backends.opened(request, tmp_path / "run") as made:
        yield made


@pytest.fixture
async def host(backend: Backend) -> AsyncIterator[SandboxHost]:
    async with SandboxHost(backend, COLD, "host") as made:
        yield made


@pytest.fixture
async def warm_host(backend: Backend) -> AsyncIterator[SandboxHost]:
    async with SandboxHost(backend, WARM, "host") as made:
        yield made


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110 - nobody is told of it
            await asyncio.sleep(0.01)


async def refusal(call: Awaitable[object]) -> MusterError:
    with pytest.raises(MusterError) as caught:
        await call
    return caught.value


def warm(host: SandboxHost) -> int:
    return sum(n for state, n in host.status().states.items() if state.value == "warm")


# Set-ups ---------------------------------------------------------------------------------------


async def test_a_set_up_runs_once_for_all_that_wait_for_it(host: SandboxHost) -> None:
    async with asyncio.TaskGroup() as tasks:
        calls = [
            tasks.create_task(acquire(host, key(sibling=n), dockerfile=SETUP)) for n in range(4)
        ]
    got = [call.result() for call in calls]
    assert sorted(one.made for one in got) == [Made.COLD, Made.FORK, Made.FORK, Made.FORK]
    for number, one in enumerate(got):
        told = await step(host, one.box, 0, "cat made", episode=key(sibling=number))
        assert told == "made\n"
    assert host.status().snapshots == 1


async def test_boxes_of_one_snapshot_change_nothing_of_each_other_s(host: SandboxHost) -> None:
    one, other = (
        await acquire(host, dockerfile=SETUP),
        await acquire(host, key(sibling=1), dockerfile=SETUP),
    )
    await step(host, one.box, 0, "echo mine >> made")
    assert await step(host, other.box, 0, "cat made", episode=key(sibling=1)) == "made\n"


async def test_tasks_that_differ_only_in_name_and_tests_share_a_set_up(host: SandboxHost) -> None:
    await acquire(host, dockerfile=SETUP, test="exit 0")
    again = await acquire(host, key(sibling=1), dockerfile=SETUP, test="exit 1")
    assert again.made is Made.FORK
    another = await acquire(host, key(sibling=2), dockerfile=SETUP + "RUN true\n")
    assert another.made is Made.COLD


async def test_a_failed_set_up_is_told_to_each_caller_and_tried_again(host: SandboxHost) -> None:
    bad = DOCKERFILE + "RUN nonsense-here\n"
    calls = [acquire(host, key(sibling=n), dockerfile=bad) for n in range(3)]
    async with asyncio.TaskGroup() as tasks:
        errors = [tasks.create_task(refusal(call)) for call in calls]
    assert {error.result().value for error in errors} == {"nonsense-here"}
    assert host.status().snapshots == 0
    assert isinstance(await refusal(acquire(host, dockerfile=bad)), InvalidInput)


async def test_snapshots_of_set_ups_are_kept_within_their_number(backend: Backend) -> None:
    config = SandboxConfig(warm_max=0, snapshots_max=2)
    async with SandboxHost(backend, config, "host") as host:
        for number in range(4):
            one = await acquire(host, dockerfile=f"{SETUP}RUN echo {number}\n")
            await host.release(KEY, one.box)
        assert host.status().snapshots == 2
        assert (await acquire(host, dockerfile=f"{SETUP}RUN echo 3\n")).made is Made.FORK
        first = await acquire(host, key(sibling=1), dockerfile=f"{SETUP}RUN echo 0\n")
        assert first.made is Made.COLD


async def test_a_snapshot_that_boxes_no_longer_start_from_is_made_anew() -> None:
    async with open_fake() as backend, SandboxHost(backend, COLD, "host") as host:
        await acquire(host, dockerfile=SETUP)
        backend.fail_starts = 3
        for sibling in (1, 2, 3):
            error = await refusal(acquire(host, key(sibling=sibling), dockerfile=SETUP))
            assert isinstance(error, Unavailable)
        assert (await acquire(host, key(sibling=4), dockerfile=SETUP)).made is Made.COLD


async def test_a_snapshot_that_cannot_be_made_is_no_box_and_leaves_nothing() -> None:
    async with open_fake() as backend, SandboxHost(backend, COLD, "host") as host:
        backend.fail_snapshots = 1
        assert isinstance(await refusal(acquire(host, dockerfile=SETUP)), Unavailable)
        assert (backend.running, backend.layers) == ([], [])
        assert host.status().counts.failures == {"snapshot": 1, "set_up": 1}
        await acquire(host, dockerfile=SETUP)


# Warm boxes ------------------------------------------------------------------------------------


async def test_the_next_caller_gets_a_box_that_stands_ready_like_a_fresh_one(
    warm_host: SandboxHost,
) -> None:
    await acquire(warm_host, dockerfile=SETUP)
    await until(lambda: warm(warm_host) > 0)
    got = await acquire(warm_host, key(group="g2"), dockerfile=SETUP)
    assert got.made is Made.WARM
    told = await step(warm_host, got.box, 0, "pwd; echo $COLOUR; cat made", episode=key(group="g2"))
    assert told == "/job\ngreen\nmade\n"


async def test_a_dead_warm_box_is_found_out_and_counted() -> None:
    async with open_fake() as backend, SandboxHost(backend, WARM, "host") as host:
        await acquire(host, dockerfile=SETUP)
        await until(lambda: warm(host) > 0)
        backend.dead |= set(backend.running)
        dead = set(backend.dead)
        other = key(group="g2")
        got = await acquire(host, other, dockerfile=SETUP)
        assert got.box not in dead
        assert await step(host, got.box, 0, "cat made", episode=other) == "made\n"
        assert host.status().counts.warm_dead == 1


async def test_no_caller_waits_because_of_a_warm_box(backend: Backend) -> None:
    config = SandboxConfig(boxes_max=2, warm_max=1)
    async with SandboxHost(backend, config, "host") as host:
        await acquire(host, dockerfile=SETUP)
        await until(lambda: warm(host) > 0)
        async with asyncio.timeout(10):
            await acquire(host, key(sibling=1), dockerfile=SETUP + "RUN true\n")


# Forks -----------------------------------------------------------------------------------------


async def test_a_fork_goes_on_from_what_the_box_is_now(host: SandboxHost) -> None:
    box = (await acquire(host)).box
    await step(host, box, 0, "echo one > kept; export COLOUR=blue")

    twin = (await host.fork(KEY, box, key(sibling=1), 20.0, after=0)).box
    await step(host, box, 1, "echo two > kept")

    into = key(sibling=1)
    record, _ = await host.execute(into, twin, 1, "cat kept; pwd; echo $COLOUR", 20, after=0)
    assert record.evidence.head + record.evidence.tail == b"one\n/job\nblue\n"
    await step(host, twin, 2, "echo three > kept", episode=into)
    assert await step(host, box, 2, "cat kept") == "two\n"


async def test_the_same_fork_again_is_the_same_box_until_either_goes_on(host: SandboxHost) -> None:
    box = (await acquire(host)).box
    into = key(sibling=1)
    first = await host.fork(KEY, box, into, 20.0, after=-1)
    assert await host.fork(KEY, box, into, 20.0, after=None) == first
    await step(host, box, 0, "true")
    assert isinstance(await refusal(host.fork(KEY, box, into, 20.0, after=None)), Refused)


async def test_a_fork_of_a_fork_is_whole_however_deep(backend: Backend) -> None:
    config = SandboxConfig(boxes_max=8, warm_max=0, squash_depth=2)
    async with SandboxHost(backend, config, "host") as host:
        box, episode = (await acquire(host, dockerfile=SETUP)).box, KEY
        for number in range(5):
            await step(host, box, number, f"echo {number} >> kept", episode=episode)
            into = key(sibling=number + 1)
            twin = (await host.fork(episode, box, into, 20.0, after=number)).box
            await host.release(episode, box)
            box, episode = twin, into
        told = await step(host, box, 5, "cat kept made", episode=episode)
        assert told == "0\n1\n2\n3\n4\nmade\n"
        await host.release(episode, box)
        assert host.status().snapshots == 1  # the set-up's


async def test_the_verdict_of_a_fork_is_over_its_own_files(host: SandboxHost) -> None:
    box = (await acquire(host, test=REWARD)).box
    await step(host, box, 0, "echo 0.25 > kept")
    into = key(sibling=1)
    twin = (await host.fork(KEY, box, into, 20.0, after=0)).box
    await step(host, twin, 1, "echo 0.75 > kept", episode=into)
    assert (await host.verify(KEY, box)).verdict.reward == 0.25
    assert (await host.verify(into, twin)).verdict.reward == 0.75


async def test_forks_that_cannot_be_are_refused(host: SandboxHost) -> None:
    box = (await acquire(host)).box
    await acquire(host, key(sibling=1))
    into = key(sibling=2)

    def fork(into: object = into, after: int | None = None) -> Awaitable[object]:
        return host.fork(KEY, box, into, 20.0, after=after)  # type: ignore[arg-type]

    assert (await refusal(fork(key(run="other", sibling=2)))).field == "into"
    assert (await refusal(fork(KEY))).field == "into"
    assert isinstance(await refusal(fork(key(sibling=1))), Refused)  # it has a box
    assert isinstance(await refusal(fork(after=3)), NotFound)
    await host.verify(KEY, box)
    assert isinstance(await refusal(fork()), Refused)  # sealed
    await host.claim("run", 6)
    assert isinstance(await refusal(fork()), Fenced)


async def test_a_fork_that_fails_leaves_the_box_as_it_was() -> None:
    async with open_fake() as backend, SandboxHost(backend, COLD, "host") as host:
        box = (await acquire(host)).box
        await step(host, box, 0, "echo one > kept")
        backend.fail_snapshots = 1
        error = await refusal(host.fork(KEY, box, key(sibling=1), 20.0, after=0))
        assert isinstance(error, Unavailable)
        assert await step(host, box, 1, "cat kept") == "one\n"
        await host.fork(KEY, box, key(sibling=1), 20.0, after=1)


# Copies ----------------------------------------------------------------------------------------


async def test_files_go_in_and_come_out(host: SandboxHost) -> None:
    box = (await acquire(host)).box
    top = CopiedFile(".", "folder", 0o755)  # as `tar -c .` has it
    files = (top, CopiedFile("a", "folder", 0o755), CopiedFile("a/b.txt", data=b"given\n"))
    counted = await host.copy_in(KEY, box, "/job/in", archives.write(files))
    assert counted == (2, 6)
    assert await step(host, box, 0, "cat in/a/b.txt; echo more >> in/a/b.txt") == "given\n"
    out = {
        f.path: f.data for f in archives.read(await host.copy_out(KEY, box, "/job/in/a"), 1 << 20)
    }
    assert out == {"a": b"", "a/b.txt": b"given\nmore\n"}


async def test_a_copy_is_refused_by_field(host: SandboxHost) -> None:
    box = (await acquire(host)).box
    assert (await refusal(host.copy_in(KEY, box, "job", b""))).field == "folder"
    assert (await refusal(host.copy_in(KEY, box, "/job", b"junk"))).field == "archive"
    assert (await refusal(host.copy_out(KEY, box, "/../etc"))).field == "path"
    assert (await refusal(host.copy_out(KEY, box, "/job/absent"))).field == "path"
    await host.verify(KEY, box)
    for call in (
        host.copy_in(KEY, box, "/job", archives.write([CopiedFile("a")])),
        host.copy_out(KEY, box, "/job"),
    ):
        assert isinstance(await refusal(call), Refused)  # its files are judged


async def test_while_a_step_runs_the_box_is_neither_copied_nor_forked(host: SandboxHost) -> None:
    box = (await acquire(host)).box
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(host.execute(KEY, box, 0, "sleep 0.5", 20))
        await asyncio.sleep(0)
        for call in (
            host.copy_out(KEY, box, "/job/data"),
            host.copy_in(KEY, box, "/job", archives.write([CopiedFile("a")])),
            host.fork(KEY, box, key(sibling=1), 20.0, after=None),
            host.verify(KEY, box),
        ):
            assert isinstance(await refusal(call), Refused)


# Capacity --------------------------------------------------------------------------------------


async def test_capacity_changes_while_callers_wait(backend: Backend) -> None:
    config = SandboxConfig(boxes_max=1, warm_max=0)
    async with SandboxHost(backend, config, "host") as host, asyncio.TaskGroup() as tasks:
        await acquire(host)
        waiting = tasks.create_task(acquire(host, key(sibling=1)))
        await asyncio.sleep(0)
        assert not waiting.done()
        assert host.set_capacity(boxes_max=2).boxes_max == 2
        await waiting
        assert host.set_capacity(boxes_max=1).boxes_max == 1
        assert host.boxes == 2


async def test_what_the_host_did_is_counted(host: SandboxHost) -> None:
    box = (await acquire(host, test=REWARD, dockerfile=SETUP)).box
    await step(host, box, 0, "echo 1 > kept")
    await host.fork(KEY, box, key(sibling=1), 20.0, after=0)
    await host.verify(KEY, box)
    await host.release(KEY, box)
    counts = host.status().counts
    assert counts.acquired == {"COLD": 1, "FORK": 1}
    assert (counts.steps, counts.verified, counts.released) == (1, 1, 1)
    assert {"start", "fork", "step", "wait", "verify", "end", "set_up"} == set(counts.seconds())
