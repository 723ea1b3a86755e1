"""The loop around a machine: in order, owned, recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from muster.driver import MachineDriver
from muster.journal import Journal


class Went(msgspec.Struct, frozen=True, tag=True):
    n: int


class Go(msgspec.Struct, frozen=True, tag=True):
    n: int


class Countdown:
    """Went(n) → Go(n - 1) until nothing is left; the last one says so."""

    name: ClassVar[str] = "countdown"
    rules_type = event_type = tick_type = Went

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.over = asyncio.Event()

    def handle(self, event: Went, now: float) -> list[Go]:
        del now
        self.seen.append(event.n)
        if event.n == 0:
            self.over.set()
        return [Go(event.n - 1)] if event.n > 0 else []


@pytest.fixture
def machine() -> Countdown:
    return Countdown()


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = Journal(tmp_path / "j.jsonl", "countdown", {})
    yield made
    made.close()


async def went(command: Go) -> Went | None:
    return Went(command.n)


async def test_what_a_command_returns_is_fed_back(machine: Countdown, journal: Journal) -> None:
    driver = MachineDriver(machine, went, journal)
    await driver.feed(Went(3))
    await driver.run(machine.over)
    assert machine.seen == [3, 2, 1, 0]


async def test_every_event_is_in_the_journal(
    machine: Countdown, journal: Journal, tmp_path: Path
) -> None:
    driver = MachineDriver(machine, went, journal)
    await driver.feed(Went(2))
    await driver.run(machine.over)
    assert (tmp_path / "j.jsonl").read_bytes().count(b"\n") == 1 + 3


async def test_a_command_without_a_result_feeds_nothing(
    machine: Countdown, journal: Journal
) -> None:
    done = asyncio.Event()

    async def silent(command: Go) -> Went | None:
        del command
        done.set()
        return None

    driver = MachineDriver(machine, silent, journal)
    await driver.feed(Went(9))
    await driver.run(done)
    assert machine.seen == [9]


async def test_a_bug_in_a_command_ends_the_driver(machine: Countdown, journal: Journal) -> None:
    async def broken(command: Go) -> Went | None:
        raise LookupError(command.n)

    driver = MachineDriver(machine, broken, journal)
    await driver.feed(Went(1))
    with pytest.raises(BaseExceptionGroup) as caught:
        await driver.run(asyncio.Event())
    assert caught.group_contains(LookupError)


async def test_stopping_cancels_running_commands(machine: Countdown, journal: Journal) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def endless(command: Go) -> Went | None:
        del command
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return None

    driver = MachineDriver(machine, endless, journal)
    await driver.feed(Went(1))
    await driver.run(begun)
    assert ended.is_set()


async def test_a_driver_may_be_stopped_before_it_began(
    machine: Countdown, journal: Journal
) -> None:
    stopping = asyncio.Event()
    stopping.set()
    await MachineDriver(machine, went, journal).run(stopping)
    assert machine.seen == []


async def test_a_full_inbox_makes_the_feeder_wait(machine: Countdown, journal: Journal) -> None:
    driver = MachineDriver(machine, went, journal, inbox_max=1)
    await driver.feed(Went(5))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await driver.feed(Went(0))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(driver.run(machine.over))
        await driver.feed(Went(-1))
    assert set(machine.seen) == {5, 4, 3, 2, 1, 0, -1}


async def test_after_is_called_after_each_event(machine: Countdown, journal: Journal) -> None:
    seen: list[int] = []
    driver = MachineDriver(machine, went, journal, after=lambda: seen.append(machine.seen[-1]))
    await driver.feed(Went(2))
    await driver.run(machine.over)
    assert seen == [2, 1, 0]


async def test_time_comes_as_an_event(machine: Countdown, journal: Journal) -> None:
    driver = MachineDriver(machine, went, journal)
    async with asyncio.TaskGroup() as tasks:
        ticking = tasks.create_task(driver.ticks(lambda: Went(0), every_s=0.001))
        await driver.run(machine.over)
        ticking.cancel()
    assert machine.seen[0] == 0


async def test_a_full_inbox_leaves_others_their_turn(machine: Countdown, journal: Journal) -> None:
    async def nothing(command: Go) -> Went | None:
        del command
        return None

    driver, stopping, seen = MachineDriver(machine, nothing, journal), asyncio.Event(), list[int]()

    async def other() -> None:
        for _ in range(3):
            await asyncio.sleep(0)
            seen.append(len(machine.seen))

    for n in range(1, 51):
        await driver.feed(Went(n))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(driver.run(stopping))
        await tasks.create_task(other())
        stopping.set()
    assert seen[-1] < 50
