"""Stopping is final: nobody waits for a machine that is gone, no task outlives its end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from muster.driver import MachineDriver
from muster.errors import Unavailable
from muster.journal import Journal
from muster.tasks import end
from services.router import events as e
from services.router.machine import RouterMachine
from services.router.rules import RouterRules


async def test_apply_during_shutdown_does_not_hang(tmp_path: Path) -> None:
    rules = RouterRules(run="r", owner_epoch=1)
    journal = Journal(tmp_path / "j", "router", rules)

    async def nothing(command: e.RouterCommand) -> None:
        return None

    driver = MachineDriver(RouterMachine(rules), nothing, journal)
    stopping = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(driver.run(stopping))
        await driver.apply(e.Tick())
        stopping.set()
    with pytest.raises(Unavailable):
        await asyncio.wait_for(driver.apply(e.Tick()), 1)
    journal.close()


async def test_an_event_that_the_machine_will_never_see_is_told_so(tmp_path: Path) -> None:
    rules = RouterRules(run="r", owner_epoch=1)
    journal = Journal(tmp_path / "j", "router", rules)

    async def nothing(command: e.RouterCommand) -> None:
        return None

    driver = MachineDriver(RouterMachine(rules), nothing, journal)
    stopping = asyncio.Event()
    stopping.set()
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(_refused(driver))
        await asyncio.sleep(0)
        tasks.create_task(driver.run(stopping))
    assert waiting.result()
    journal.close()


async def _refused(driver: MachineDriver[e.RouterEvent, e.RouterCommand]) -> bool:
    try:
        await asyncio.wait_for(driver.apply(e.Tick()), 2)
    except Unavailable:
        return True
    return False


async def test_a_cancellation_that_meets_a_result_does_not_outlive_the_stop() -> None:
    """As asyncio.wait_for does it before Python 3.12, and redis-py uses it for every write."""

    async def loop() -> None:
        swallowed = False
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if swallowed:
                    raise
                swallowed = True

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(loop())
        await asyncio.sleep(0)
        await asyncio.wait_for(end(task), 2)
    assert task.cancelled()
