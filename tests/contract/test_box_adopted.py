"""Boxes that outlive their service, and verdicts beside living processes: a host's calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from muster.errors import Fenced, MusterError, Refused, Unavailable
from services.sandbox.adapters.callers import Made
from services.sandbox.adapters.fake import FakeBackend, open_fake
from services.sandbox.box import Backend
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


@pytest.fixture(params=backends.KILLED)
async def opening(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[backends.Opening]:
    async with backends.killed(request, tmp_path / "run") as made:
        yield made


@pytest.fixture
async def host(backend: Backend) -> AsyncIterator[SandboxHost]:
    async with SandboxHost(backend, COLD, "host") as made:
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


# Adoption --------------------------------------------------------------------------------------


async def test_a_host_that_comes_back_goes_on_in_the_boxes_of_the_former(
    opening: backends.Opening,
) -> None:
    async with opening() as backend, SandboxHost(backend, COLD, "host") as former:
        box = (await acquire(former, dockerfile=SETUP, test=REWARD)).box
        await step(former, box, 0, "echo 1 > kept; echo said")
    async with opening() as backend, SandboxHost(backend, COLD, "host") as host:
        living = [(one.box, one.key, one.newest_turn) for one in await host.claim("run", 6)]
        assert living == [(box, KEY, 0)]
        record, repeated = await host.execute(NEWER, box, 0, "echo 1 > kept; echo said", 10)
        assert (record.evidence.head + record.evidence.tail, repeated) == (b"said\n", True)
        assert await step(host, box, 1, "cat made", episode=NEWER) == "made\n"
        assert (await host.verify(NEWER, box, after=1)).verdict.reward == 1.0
        assert host.status().counts.adopted == 1
        other = key(sibling=7, owner_epoch=6)
        assert (await acquire(host, other, dockerfile=SETUP)).made is Made.FORK


SWEPT = "a container whose step ran at the kill is swept: test_sandbox_docker_adopt"


@pytest.mark.parametrize(
    "opened", [open_fake, pytest.param(None, id="docker", marks=pytest.mark.skip(reason=SWEPT))]
)
async def test_a_step_that_ran_on_meanwhile_is_waited_for(
    opened: Callable[[], AbstractAsyncContextManager[FakeBackend]],
) -> None:
    async with opened() as backend:
        async with SandboxHost(backend, COLD, "host") as former:
            box = (await acquire(former)).box
        backend.begun[box] = (0, "echo late")
        async with SandboxHost(backend, COLD, "host") as host:
            record, repeated = await host.execute(KEY, box, 0, "echo late", 10)
            assert (record.evidence.head, repeated) == (b"late\n", True)
            assert await step(host, box, 1, "echo on") == "on\n"


async def test_a_former_owner_is_refused_by_the_next_service_too(
    opening: backends.Opening,
) -> None:
    async with opening() as backend, SandboxHost(backend, COLD, "host") as former:
        box = (await acquire(former)).box
        await step(former, box, 0, "true", episode=NEWER)
    async with opening() as backend, SandboxHost(backend, COLD, "host") as host:
        assert isinstance(await refusal(host.execute(KEY, box, 1, "true", 10)), Fenced)


async def test_boxes_that_were_nobody_s_end_at_once(opening: backends.Opening) -> None:
    async with opening() as backend, SandboxHost(backend, WARM, "host") as former:
        box = (await acquire(former, dockerfile=SETUP)).box
        await until(lambda: warm(former) > 0)
        assert len(await backends.there(backend)) > 1
    async with opening() as backend, SandboxHost(backend, COLD, "host"):
        assert await backends.there(backend) == [box]


async def test_a_box_taken_over_that_nobody_uses_ends_in_time() -> None:
    config = SandboxConfig(warm_max=0, adopt_s=0.3)
    async with open_fake() as backend:
        async with SandboxHost(backend, config, "host") as former:
            used, unused = await acquire(former), await acquire(former, key(sibling=1))
        async with SandboxHost(backend, config, "host") as host:
            assert await step(host, used.box, 0, "echo on") == "on\n"
            await until(lambda: unused.box not in backend.running)
            assert await step(host, used.box, 1, "echo on") == "on\n"


async def test_a_fork_taken_over_knows_the_turns_before_it(opening: backends.Opening) -> None:
    async with opening() as backend, SandboxHost(backend, COLD, "host") as former:
        box = (await acquire(former)).box
        await step(former, box, 0, "echo one > kept")
        into = key(sibling=1)
        twin = (await former.fork(KEY, box, into, 20.0, after=0)).box
    async with opening() as backend, SandboxHost(backend, COLD, "host") as host:
        assert await backends.images(backend) == 2
        record, _ = await host.execute(into, twin, 1, "cat kept", 10, after=0)
        assert record.evidence.head + record.evidence.tail == b"one\n"
        await host.release(KEY, box)
        await host.release(into, twin)
        async with asyncio.timeout(20):
            while await backends.images(backend) != 1:  # noqa: ASYNC110 - the set-up's
                await asyncio.sleep(0.01)


async def test_the_same_fork_again_is_the_same_box_after_a_kill_too(
    opening: backends.Opening,
) -> None:
    into = key(sibling=1)
    async with opening() as backend, SandboxHost(backend, COLD, "host") as former:
        box = (await acquire(former)).box
        await step(former, box, 0, "true")
        first = await former.fork(KEY, box, into, 20.0, after=0)
    async with opening() as backend, SandboxHost(backend, COLD, "host") as host:
        again = await host.fork(KEY, box, into, 20.0, after=0)
        assert (again.box, again.made) == (first.box, first.made)
        await step(host, again.box, 1, "true", episode=into)
        assert isinstance(await refusal(host.fork(KEY, box, into, 20.0, after=0)), Refused)


async def test_a_box_taken_over_unused_is_told_as_it_was_made(opening: backends.Opening) -> None:
    async with opening() as backend, SandboxHost(backend, COLD, "host") as former:
        first = await acquire(former, dockerfile=SETUP)
        twin = await acquire(former, key(sibling=1), dockerfile=SETUP)
    async with opening() as backend, SandboxHost(backend, COLD, "host") as host:
        for was, episode in ((first, KEY), (twin, key(sibling=1))):
            got = await acquire(host, episode, dockerfile=SETUP)
            assert (got.box, got.made, got.start_s) == (was.box, was.made, was.start_s)
        assert (first.made, twin.made) == (Made.COLD, Made.FORK)


# Live verification -----------------------------------------------------------------------------

LIVE = '[metadata]\nmuster_verify = "live"\n'


async def test_a_live_verdict_is_told_again_and_its_box_is_sealed_then(host: SandboxHost) -> None:
    test = "test -f /job/answer.txt && exit 3; echo 1 > /logs/verifier/reward.txt"
    box = (await acquire(host, toml=LIVE, test=test)).box
    await step(host, box, 0, "echo mine > answer.txt")
    first = await host.verify(KEY, box)
    assert first.verdict.reward == 1.0  # the agent's files are not the verifier's
    assert await host.verify(KEY, box) == first
    assert isinstance(await refusal(host.execute(KEY, box, 1, "true", 10)), Refused)


async def test_a_live_verdict_that_could_not_be_had_is_asked_for_again() -> None:
    async with open_fake() as backend, SandboxHost(backend, COLD, "host") as host:
        test = "echo 1 > /logs/verifier/reward.txt"
        box = (await acquire(host, toml=LIVE, test=test)).box
        backend.fail_steps = 1
        assert isinstance(await refusal(host.verify(KEY, box)), Unavailable)
        assert (await host.verify(KEY, box)).verdict.reward == 1.0


async def test_a_box_sealed_after_a_live_verdict_is_not_taken_over() -> None:
    async with open_fake() as backend:
        async with SandboxHost(backend, COLD, "host") as former:
            await former.verify(KEY, (await acquire(former, toml=LIVE)).box)
        async with SandboxHost(backend, COLD, "host"):
            assert backend.running == []
