"""A router is replaced: its boxes live on for the next one, told on the fake and on real boxes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from muster.errors import Fenced, MusterError, NotFound, Refused
from muster.types import Limits
from services.sandbox.adapters.fake import FakeBackend, open_fake
from services.sandbox.box import HOST, Backend, Evidence, Judgement, JudgeSpec, Source
from services.sandbox.config import SandboxConfig
from services.sandbox.driver import SandboxHost
from tests.contract import backends
from tests.contract.hosts import KEY, acquire, key, step

NEWER = key(owner_epoch=6)
REWARD = "echo 1 > /logs/verifier/reward.txt"


@pytest.fixture(params=backends.ALL)
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Backend]:
    async with backends.opened(request, tmp_path / "run") as made:
        yield made


@pytest.fixture
async def host(backend: Backend) -> AsyncIterator[SandboxHost]:
    async with SandboxHost(backend, SandboxConfig(boxes_max=2, warm_max=0), "host") as made:
        yield made


class SlowBackend(FakeBackend):
    """Steps, verdicts and starts wait until the test says `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.go = asyncio.Event(), asyncio.Event()
        self.slow_starts = False
        self.ran = 0

    async def start(self, box: str, limits: Limits, source: Source = HOST) -> None:
        if self.slow_starts:
            self.began.set()
            await self.go.wait()
        await super().start(box, limits, source)

    async def run(self, box: str, command: str, timeout_s: float, turn: int = -1) -> Evidence:
        self.ran += 1
        self.began.set()
        await self.go.wait()
        return await super().run(box, command, timeout_s, turn)

    async def judge(self, box: str, spec: JudgeSpec) -> Judgement:
        self.ran += 1
        self.began.set()
        await self.go.wait()
        return await super().judge(box, spec)


@pytest.fixture
def slow() -> SlowBackend:
    return SlowBackend()


@pytest.fixture
async def slow_host(slow: SlowBackend) -> AsyncIterator[SandboxHost]:
    async with SandboxHost(slow, SandboxConfig(boxes_max=2, warm_max=0), "host") as made:
        yield made


async def set_up(slow: SlowBackend, host: SandboxHost) -> None:
    """The task's snapshot is there, no box is, and every further start waits."""
    other = key(sibling=9)
    await host.release(other, (await acquire(host, other)).box)
    slow.slow_starts = True


async def refused(call: Any, error: type[MusterError]) -> None:
    with pytest.raises(error):
        await call


async def refusal(call: Any) -> MusterError:
    with pytest.raises(MusterError) as caught:
        await call
    return caught.value


async def test_a_new_owner_goes_on_in_the_box_of_the_former(host: SandboxHost) -> None:
    box = (await acquire(host)).box
    await step(host, box, 0, "echo one > kept; export COLOUR=blue")

    told = await step(host, box, 1, "cat kept; echo $COLOUR", episode=NEWER)

    assert told == "one\nblue\n"


async def test_a_claim_names_the_living_boxes_and_the_newest_turn(host: SandboxHost) -> None:
    used, unused = await acquire(host), await acquire(host, key(sibling=1))
    await step(host, used.box, 0, "true")
    await step(host, used.box, 1, "true")

    living = {one.box: (one.key, one.newest_turn) for one in await host.claim("run", 6)}

    assert living == {used.box: (KEY, 1), unused.box: (key(sibling=1), -1)}
    assert await host.claim("another-run", 1) == []


async def test_a_former_owner_is_refused_everywhere_and_counted(host: SandboxHost) -> None:
    box = (await acquire(host)).box
    await host.claim("run", 6)

    await refused(host.claim("run", 5), Fenced)
    await refused(acquire(host), Fenced)
    await refused(host.execute(KEY, box, 0, "true", 10), Fenced)
    await refused(host.verify(KEY, box), Fenced)
    await refused(host.release(KEY, box), Fenced)

    assert host.fenced_calls == 5
    assert [one.box for one in await host.claim("run", 6)] == [box]


async def test_the_kept_answer_of_a_step_is_the_next_owner_s_too(host: SandboxHost) -> None:
    box = (await acquire(host)).box
    await step(host, box, 0, "echo x >> log; cat log")

    record, repeated = await host.execute(NEWER, box, 0, "echo x >> log; cat log", 10)

    assert (record.evidence.head, repeated) == (b"x\n", True)
    await refused(host.execute(NEWER, box, 0, "echo another", 10), Refused)


async def test_a_fresh_box_replaces_one_that_was_used(host: SandboxHost) -> None:
    old = (await acquire(host)).box
    await step(host, old, 0, "echo one > kept")
    await refused(acquire(host, NEWER), Refused)

    new = (await acquire(host, NEWER, fresh=True)).box

    record, _ = await host.execute(NEWER, new, 0, "test -f kept", 10)
    assert record.evidence.exit_code == 1
    await refused(host.execute(NEWER, old, 1, "true", 10), NotFound)
    assert host.boxes == 1


async def test_a_fresh_box_that_was_not_used_yet_is_given_again(host: SandboxHost) -> None:
    first = await acquire(host, fresh=True)

    assert await acquire(host, fresh=True) == first
    assert await acquire(host, NEWER, fresh=True) == first


async def test_a_running_step_is_waited_for_by_the_next_owner(
    slow: SlowBackend, slow_host: SandboxHost
) -> None:
    box = (await acquire(slow_host)).box
    async with asyncio.TaskGroup() as tasks:
        former = slow_host.execute(KEY, box, 0, "echo once", 10)
        tasks.create_task(refused(former, Fenced))
        await slow.began.wait()
        newer = tasks.create_task(slow_host.execute(NEWER, box, 0, "echo once", 10))
        await asyncio.sleep(0)
        slow.go.set()

    record, repeated = newer.result()
    assert (record.evidence.head, repeated, slow.ran) == (b"once\n", True, 1)
    assert slow_host.fenced_calls == 1


async def test_a_step_of_a_box_that_is_ended_did_not_take_it_along(
    slow: SlowBackend, slow_host: SandboxHost
) -> None:
    box = (await acquire(slow_host)).box
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(refused(slow_host.execute(KEY, box, 0, "echo once", 10), Fenced))
        await slow.began.wait()
        running = tasks.create_task(refusal(slow_host.execute(NEWER, box, 0, "echo once", 10)))
        tasks.create_task(acquire(slow_host, NEWER, fresh=True))
        while slow.running == [box]:  # noqa: ASYNC110 - nobody is told of it
            await asyncio.sleep(0)
        slow.go.set()
    told = running.result()
    assert isinstance(told, NotFound)
    assert (told.field, told.value) == ("box", box)


async def test_a_running_verification_is_waited_for_by_the_next_owner(
    slow: SlowBackend, slow_host: SandboxHost
) -> None:
    box = (await acquire(slow_host, test=REWARD)).box
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(refused(slow_host.verify(KEY, box), Fenced))
        await slow.began.wait()
        newer = tasks.create_task(slow_host.verify(NEWER, box))
        await asyncio.sleep(0)
        slow.go.set()

    assert (newer.result().verdict.reward, slow.ran) == (1.0, 1)


async def test_a_verdict_that_nobody_got_is_kept_and_the_next_call_judges_again(
    slow: SlowBackend, slow_host: SandboxHost
) -> None:
    slow.go.set()
    box = (await acquire(slow_host, test=REWARD)).box
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await slow_host.verify(KEY, box)
    for _ in range(20):  # it ends with nobody waiting
        await asyncio.sleep(0)
    for runs in (1, 2):  # the one that was left, then one more
        assert (await slow_host.verify(KEY, box)).verdict.reward == 1.0
        assert slow.ran == runs


async def test_a_starting_box_is_handed_to_the_next_owner(
    slow: SlowBackend, slow_host: SandboxHost
) -> None:
    await set_up(slow, slow_host)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(refused(acquire(slow_host), Fenced))
        await slow.began.wait()
        newer = tasks.create_task(acquire(slow_host, NEWER, fresh=True))
        await asyncio.sleep(0)
        slow.go.set()

    assert slow.running == [newer.result().box]


async def test_a_start_goes_on_for_a_new_owner_that_asks_only_later(
    slow: SlowBackend, slow_host: SandboxHost
) -> None:
    await set_up(slow, slow_host)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(refused(acquire(slow_host), Fenced))
        await slow.began.wait()
        await slow_host.claim("run", 6)
    async with asyncio.TaskGroup() as tasks:
        newer = tasks.create_task(acquire(slow_host, NEWER, fresh=True))
        await asyncio.sleep(0)
        slow.go.set()

    assert slow.running == [newer.result().box]
    assert newer.result().box.endswith("-3")  # after the set-up's and the first caller's: its own


async def test_a_caller_of_a_former_owner_no_longer_waits_for_a_place(host: SandboxHost) -> None:
    for sibling in range(2):
        await acquire(host, key(sibling=sibling))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(refused(acquire(host, key(sibling=2)), Fenced))
        await asyncio.sleep(0)
        await host.claim("run", 6)


async def test_boxes_that_the_new_owner_does_not_use_end_and_the_others_stay() -> None:
    config = SandboxConfig(adopt_s=0.2, warm_max=0)
    async with open_fake() as backend, SandboxHost(backend, config, "host") as host:
        used, _ = await acquire(host), await acquire(host, key(sibling=1))
        await step(host, used.box, 0, "true", episode=NEWER)
        async with asyncio.timeout(10):
            while len(backend.running) > 1:  # noqa: ASYNC110 - nobody is told of it
                await asyncio.sleep(0.01)
        assert await step(host, used.box, 1, "echo on", episode=NEWER) == "on\n"


async def test_a_box_that_is_ahead_of_its_callers_records_is_neither_used_nor_judged(
    host: SandboxHost,
) -> None:
    box = (await acquire(host)).box
    await step(host, box, 0, "true")
    errors = [
        await refusal(host.execute(NEWER, box, 1, "true", 10, after=-1)),
        await refusal(host.verify(NEWER, box, after=-1)),
    ]
    assert [(type(e), e.field, e.value) for e in errors] == [(NotFound, "box", box)] * 2
    assert (await host.verify(NEWER, box, after=0)).verdict is not None
