"""The driver over fakes: whole steps, a bank that goes away, a stop in the middle."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from muster.errors import InvalidInput, Refused, Unavailable
from services.trainer.adapters import worker
from services.trainer.adapters.checkpoint import CheckpointStore
from services.trainer.adapters.fake import FakeBank, FakeFleet, FakePolicy, FakeVersionLog
from services.trainer.driver import Driver, DriverSettings
from services.trainer.ports import KnownVersion
from services.trainer.schedule import Phase
from tests.unit.trainer.stories import batch, group, prompt, sampled, trajectory


class Stage:
    """The outer world of a trainer; `run` lives one incarnation until the bank is drained."""

    def __init__(self, folder: Path, steps: int = 2):
        self.folder = folder
        self.bank = FakeBank(
            {step: batch(*group(f"g{step}", 1.0, 0.0), step=step) for step in range(1, steps + 1)}
        )
        self.versions, self.fleet = FakeVersionLog(), FakeFleet("a", "b")
        self.load: Callable[[Path], FakePolicy] = FakePolicy.load
        self.retry_s = 5.0

    def driver(self) -> Driver:
        return Driver(
            DriverSettings("run", 1, self.folder, retry_s=self.retry_s, retry_first_s=0.001),
            load=self.load,
            store=CheckpointStore(self.folder / "checkpoints", "run", keep=2),
            bank=self.bank,
            versions=self.versions,
            fleet=self.fleet,
        )

    async def run(self) -> Driver:
        driver, stopping = self.driver(), asyncio.Event()
        self.bank.drained.clear()
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(driver.run(stopping))
            drained = tasks.create_task(self.bank.drained.wait())
            await asyncio.wait([running, drained], return_when=asyncio.FIRST_COMPLETED)
            stopping.set()
            drained.cancel()
        return driver


async def test_two_steps_become_two_versions(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    driver = await stage.run()
    assert stage.bank.acknowledged == [0, 1, 2]
    assert stage.fleet.serving == {"a": 2, "b": 2}
    assert driver.machine.step == 2
    durable = [r for r in stage.versions.records if not r.published]
    assert [(r.version, r.parent) for r in durable] == [(0, -1), (1, 0), (2, 1)]
    assert len({r.digest for r in durable}) == 3
    assert [r.version for r in stage.versions.records if r.published] == [1, 2]


async def test_a_restart_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    stage = Stage(tmp_path, steps=1)
    await stage.run()
    stage.bank.batches[2] = batch(*group("g2", 1.0, 0.0), step=2)
    stage.fleet.serving["b"] = 0  # restarted with the base model
    await stage.run()
    assert stage.bank.registered == [0, 1]
    assert FakePolicy.load(tmp_path / "checkpoints" / "step-000002").steps == [1, 2]
    assert stage.fleet.published == [1, 1, 2]


async def test_a_bank_that_restarts_is_waited_for(tmp_path: Path) -> None:
    stage = Stage(tmp_path, steps=1)
    stage.bank.away = 3
    assert (await stage.run()).machine.step == 1


async def test_a_bank_that_stays_away_ends_the_trainer_with_an_error(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.bank.away, stage.retry_s = 1000, 0.0
    with pytest.raises(ExceptionGroup) as failed:
        await stage.run()
    assert failed.group_contains(Unavailable, match="has been away")


async def test_a_stop_in_the_middle_of_a_step_leaves_no_trace(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    policy = FakePolicy(slow=True)
    stage.load = lambda folder: policy
    driver, stopping = stage.driver(), asyncio.Event()
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tasks.create_task(driver.run(stopping))
        await asyncio.to_thread(policy.training.wait, 15)
        stopping.set()
    assert driver.machine.phase is Phase.STOPPED
    assert stage.bank.acknowledged == [0]
    assert not (tmp_path / "checkpoints").exists()


async def test_a_stop_while_the_model_loads_is_heard_at_once(tmp_path: Path) -> None:
    """And the door to the outside was never opened."""
    stage, loading, release = Stage(tmp_path), threading.Event(), threading.Event()
    opened: list[str] = []

    def load(folder: Path) -> FakePolicy:
        loading.set()
        release.wait(15)
        return FakePolicy.load(folder)

    @asynccontextmanager
    async def door() -> AsyncIterator[None]:
        opened.append("open")
        yield

    stage.load = load
    driver, stopping = stage.driver(), asyncio.Event()
    driver.door = door
    try:
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            tasks.create_task(driver.run(stopping))
            await asyncio.to_thread(loading.wait, 15)
            stopping.set()
        assert worker.at_work()  # nobody waited for it
    finally:
        release.set()
    assert driver.machine.phase is Phase.STOPPED
    assert not opened


async def test_the_door_is_open_while_the_trainer_is_restored_and_runs(tmp_path: Path) -> None:
    stage, told = Stage(tmp_path, steps=1), []

    @asynccontextmanager
    async def door() -> AsyncIterator[None]:
        told.append(driver.machine.phase)
        try:
            yield
        finally:
            told.append(driver.machine.phase)

    driver, stopping = stage.driver(), asyncio.Event()
    driver.door = door
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tasks.create_task(driver.run(stopping))
        await stage.bank.drained.wait()
        stopping.set()
    assert told == [Phase.STARTING, Phase.STOPPED]


async def test_a_checkpoint_brings_its_batch_back_to_the_bank(tmp_path: Path) -> None:
    stage = Stage(tmp_path, steps=2)
    await stage.run()
    await stage.run()
    assert stage.bank.brought == [None, stage.bank.batches[2].frozen]


async def test_a_replica_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.fleet.failing.add("b")
    await stage.run()
    assert stage.fleet.serving == {"a": 2, "b": 0}


async def test_another_model_under_the_same_run_is_refused(tmp_path: Path) -> None:
    stage = Stage(tmp_path, steps=0)
    await stage.run()
    stage.load = lambda folder: FakePolicy([99])
    with pytest.raises(ExceptionGroup) as failed:
        await stage.run()
    assert failed.group_contains(Refused, match="other weights")


async def test_tokens_of_a_strange_version_stop_the_trainer(tmp_path: Path) -> None:
    stage = Stage(tmp_path, steps=0)
    odd = trajectory("g", 0, 1.0, [prompt(), sampled(1, version=9)])
    stage.bank.batches[1] = batch(odd, *group("g", 1.0, 0.0)[1:])
    with pytest.raises(ExceptionGroup) as failed:
        await stage.run()
    assert failed.group_contains(InvalidInput, match="not a version of this run")
    assert stage.bank.acknowledged == [0]


class _Swallows(FakeVersionLog):
    """Its write meets its cancellation, which is then lost: asyncio.wait_for before Python 3.12."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = asyncio.Event()

    async def known(self) -> dict[int, KnownVersion]:
        self.begun.set()
        swallowed = False
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if swallowed:
                    raise
                swallowed = True


async def test_a_stop_whose_cancellation_is_lost_in_a_write_still_ends(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    log = stage.versions = _Swallows()
    driver, stopping = stage.driver(), asyncio.Event()
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        tasks.create_task(driver.run(stopping))
        await log.begun.wait()
        stopping.set()
