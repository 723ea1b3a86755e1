"""The driver over fakes: whole steps, a bank that goes away, a stop in the middle."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from muster.errors import InvalidInput, Refused, Unavailable
from services.trainer import ports
from services.trainer.adapters import worker
from services.trainer.adapters.checkpoint import CheckpointStore
from services.trainer.adapters.fake import FakePolicy
from services.trainer.alarms import AlarmLimits
from services.trainer.driver import Driver, DriverSettings
from services.trainer.figures import Mismatch, StepFigures
from services.trainer.plan import StepPlan
from services.trainer.policy import Judge, Stop
from services.trainer.ports import KnownVersion
from services.trainer.schedule import Phase
from tests.unit.trainer.fakes import FakeBank, FakeFleet, FakeVersionLog
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
        self.settings = DriverSettings("run", 1, folder, retry_s=5.0, retry_first_s=0.001)
        self.keep = 2

    def driver(self) -> Driver:
        return Driver(
            self.settings,
            load=self.load,
            store=CheckpointStore(self.folder / "checkpoints", "run", self.keep),
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
    durable = [r for r in stage.versions.records if r.stage is ports.Stage.DURABLE]
    assert [(r.version, r.parent) for r in durable] == [(0, -1), (1, 0), (2, 1)]
    assert len({r.digest for r in durable}) == 3
    assert [r.version for r in stage.versions.records if r.stage is ports.Stage.PUBLISHED] == [1, 2]


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
    stage.bank.away, stage.settings = 1000, replace(stage.settings, retry_s=0.0)
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


async def test_a_checkpoint_brings_every_batch_since_the_one_before_it(tmp_path: Path) -> None:
    """In one registration: a bank that lost them takes all of them, or none."""
    stage = Stage(tmp_path, steps=5)
    stage.settings = replace(stage.settings, checkpoint_every=2)
    await stage.run()
    assert stage.bank.brought == []
    await stage.run()
    assert stage.bank.registered == [0, 4]
    assert stage.bank.brought == [3, 4]


async def test_a_checkpoint_that_alone_is_kept_is_gone_on_from(tmp_path: Path) -> None:
    """The bank has deleted the batches that led to it, and refuses those that they would need."""
    stage = Stage(tmp_path, steps=3)
    stage.keep = 1
    stage.settings = replace(stage.settings, checkpoint_every=3)
    await stage.run()
    stage.bank.registered.clear()
    stage.bank.batches[4] = batch(*group("g4", 1.0, 0.0), step=4)
    await stage.run()
    assert stage.bank.mark == 3
    assert stage.bank.registered == [3]


async def test_a_checkpoint_older_than_what_is_deleted_is_refused(tmp_path: Path) -> None:
    stage = Stage(tmp_path, steps=3)
    await stage.run()
    stage.bank.mark = 4
    with pytest.raises(BaseExceptionGroup) as refused:
        await stage.run()
    assert refused.group_contains(Refused, match="up to step 4 are deleted")


async def test_a_restart_trains_again_what_no_checkpoint_has(tmp_path: Path) -> None:
    stage = Stage(tmp_path, steps=3)
    stage.settings = replace(stage.settings, checkpoint_every=2)
    await stage.run()
    assert stage.bank.acknowledged == [0, 2]
    stage.bank.batches[4] = batch(*group("g4", 1.0, 0.0), step=4)
    await stage.run()
    assert stage.bank.acknowledged == [0, 2, 4]
    assert FakePolicy.load(tmp_path / "checkpoints" / "step-000004").steps == [1, 2, 3, 4]
    trained = [r for r in stage.versions.records if r.stage is ports.Stage.TRAINED]
    assert [(r.version, r.parent) for r in trained] == [(1, 0), (3, 2), (4, 2)]


async def test_the_bank_is_told_the_oldest_checkpoint_and_the_others_go(tmp_path: Path) -> None:
    stage = Stage(tmp_path, steps=4)
    await stage.run()
    assert stage.bank.oldest_kept == 3
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert kept == ["step-000003", "step-000004"]


async def test_a_return_to_an_older_checkpoint_trains_what_it_had_not_seen(tmp_path: Path) -> None:
    stage = Stage(tmp_path, steps=3)
    stage.keep = 3
    await stage.run()
    stage.settings = replace(stage.settings, epoch=2, start_step=1)
    await stage.run()
    assert stage.bank.registered[-1] == 1
    assert stage.bank.acknowledged == [0, 1, 2, 3, 2, 3]
    assert stage.versions.records[-2].parent == 4  # version 5, of step 3, on the new branch
    aside = sorted(path.name for path in (tmp_path / "checkpoints").glob("aside-*"))
    assert aside == ["aside-000002-step-000002", "aside-000002-step-000003"]


async def test_the_next_step_is_trained_while_a_version_is_on_its_way(tmp_path: Path) -> None:
    """The line stands still from the first version on: step 1 is trained, step 2 waits for it."""
    stage = Stage(tmp_path, steps=3)
    stage.settings = replace(stage.settings, ahead_max=1)
    stage.fleet.line.clear()
    recorded, changed = stage.versions.records, stage.versions.changed
    driver, stopping = stage.driver(), asyncio.Event()
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tasks.create_task(driver.run(stopping))
        async with changed:
            await changed.wait_for(lambda: [r.version for r in recorded] == [0, 1])
        while driver.machine.phase is not Phase.PUBLISHING:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)
        assert (stage.fleet.begun, stage.fleet.serving) == ([0], {"a": 0, "b": 0})
        stage.fleet.line.set()
        await stage.bank.drained.wait()
        while driver.machine.outgoing.behind:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        stopping.set()
    assert stage.fleet.serving == {"a": 3, "b": 3}
    assert stage.fleet.published == sorted(stage.fleet.published)
    assert stage.bank.acknowledged == [0, 1, 2, 3]


async def test_a_stop_in_the_middle_of_a_publication_is_heard_at_once(tmp_path: Path) -> None:
    stage = Stage(tmp_path, steps=1)
    stage.fleet.line.clear()
    driver, stopping = stage.driver(), asyncio.Event()
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tasks.create_task(driver.run(stopping))
        while not stage.fleet.begun:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)
        stopping.set()
    assert driver.machine.phase is Phase.STOPPED


async def test_restored_weights_that_are_not_those_of_their_version_stop_the_trainer(
    tmp_path: Path,
) -> None:
    stage = Stage(tmp_path, steps=1)
    await stage.run()
    stage.load = lambda folder: FakePolicy([1, 1])
    with pytest.raises(ExceptionGroup) as failed:
        await stage.run()
    assert failed.group_contains(Refused, match="not those that were saved")


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


async def test_records_that_a_power_cut_took_are_written_again(tmp_path: Path) -> None:
    stage = Stage(tmp_path, steps=1)
    stage.settings = replace(stage.settings, replica_check_s=0.01)
    log = stage.versions
    driver, stopping = stage.driver(), asyncio.Event()
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tasks.create_task(driver.run(stopping))
        await stage.bank.drained.wait()
        published = ports.Stage.PUBLISHED
        before = [(r.version, r.stage) for r in log.records]
        assert before == [(0, ports.Stage.DURABLE), (1, ports.Stage.DURABLE), (1, published)]
        log.lose(3)
        async with log.changed:
            await log.changed.wait_for(lambda: len(log.records) == len(before))
        stopping.set()
    assert [(r.version, r.stage) for r in log.records] == before


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


class _Drifts(FakePolicy):
    """Engine and trainer lie far apart in its second step alone."""

    def train(
        self, plan: StepPlan, stop: Stop, judge: Judge = lambda measured: True
    ) -> StepFigures:
        figures = super().train(plan, stop, judge)
        k3 = 0.5 if plan.step == 2 else 0.001
        return replace(figures, mismatch=Mismatch(tokens=9, k3=k3, truncated_share=k3))


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        (AlarmLimits(k3=0.02, truncated=0.0), ["step 2: mismatch k3 0.5 per token is above 0.02"]),
        (AlarmLimits(k3=0.0, truncated=0.05), ["step 2: the correction cuts 50.0% of tokens"]),
        (AlarmLimits(k3=0.0, truncated=0.0), []),
    ],
)
async def test_a_step_beyond_a_limit_is_told_with_its_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, limits: AlarmLimits, told: list[str]
) -> None:
    stage = Stage(tmp_path, steps=3)
    stage.load = lambda folder: _Drifts()
    stage.settings = replace(stage.settings, alarms=limits)
    await stage.run()
    warned = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert [line[: len(start)] for line, start in zip(warned, told, strict=True)] == told
    assert stage.bank.acknowledged == [0, 1, 2, 3]  # an alarm stops nothing


async def test_advantages_are_those_of_the_chosen_estimator(tmp_path: Path) -> None:
    plans: list[StepPlan] = []

    class Keeps(FakePolicy):
        def train(
            self, plan: StepPlan, stop: Stop, judge: Judge = lambda measured: True
        ) -> StepFigures:
            plans.append(plan)
            return super().train(plan, stop, judge)

    stage = Stage(tmp_path, steps=1)
    stage.load = lambda folder: Keeps()
    stage.settings = replace(stage.settings, advantage="rloo")
    await stage.run()
    assert plans[0].advantages == (1.0, -1.0)  # rewards 1 and 0
