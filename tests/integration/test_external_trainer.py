"""A trainer of one's own, against the real bank, a real server, and replicas that really receive.

The model is a random Llama of a few thousand parameters; the engines verify what arrives.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from muster import rpc
from muster.bank import AsyncBankClient, BankClient
from muster.engine_tensors import model_slots
from muster.errors import Fenced, InvalidInput, Refused, Unavailable
from muster.find_run import Where
from muster.publish import AsyncPublisher, Publisher
from muster.registry import Registry
from muster.streams import RunStreams, next_epoch
from muster.v1 import events_pb2 as ev
from muster.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from services.inference.adapters.fake import FakeEngine, Script
from services.inference.adapters.receive import receive_and_verify
from services.inference.driver import ReplicaDriver
from services.inference.replica import Bounds, Replica, State
from services.inference.server import InferenceServicer
from sim.builders import INFRA, scored
from tests.integration.test_readybank import BankProcess, Router, _ended
from tests.integration.test_trainer import model as model

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.timeout(240)]


class World:
    """A run with a bank and replicas, and no trainer."""

    def __init__(self, folder: Path, redis: Redis, run: str, url: str, model: Path):
        self.redis, self.run, self.model, self.folder = redis, run, model, folder
        self.bank = BankProcess(folder, run, url)
        text = self.bank.config.read_text()
        self.bank.config.write_text(
            f'groups_per_batch = 1\nrepairs_max = 0\n{text}[model]\npath = "{model}"\n'
        )
        self.router: Router
        self.replicas: dict[str, ReplicaDriver] = {}
        self._stack: AsyncExitStack

    @property
    def where(self) -> Where:
        return {"config": self.bank.config}

    async def groups(self, *names: str) -> None:
        for name in names:
            await self.router.group(name, scored(1.0), scored(0.0), INFRA)

    async def replica(self, name: str, script: Script | None = None, version: int = 0) -> None:
        shapes = {name: slot.shape for name, slot in model_slots(self.model).items()}
        engine = FakeEngine(script or Script(), receive=partial(receive_and_verify))
        bounds = Bounds(requests_max=4, scores_max=2, tokens_max=2048)
        driver = ReplicaDriver(
            Replica(self.run, bounds), engine, receive_timeout_s=600.0, expected=shapes
        )
        enter = self._stack.enter_async_context
        await enter(driver)
        await driver.start(version)
        services = [(add_InferenceServiceServicer_to_server, InferenceServicer(name, driver))]
        server = await enter(rpc.serve("127.0.0.1:0", services))
        await enter(Registry(self.redis, self.run).announce("inference", name, server.address))
        self.replicas[name] = driver

    def served(self) -> dict[str, tuple[State, int]]:
        return {n: (d.replica.state, d.replica.version) for n, d in self.replicas.items()}

    async def records(self) -> list[ev.PolicyVersionRecord]:
        messages = await RunStreams(self.redis, self.run).read_all("versions")
        return [ev.PolicyVersionRecord.FromString(message.data) for message in messages]

    async def fates(self) -> list[tuple[str, int]]:
        messages = await RunStreams(self.redis, self.run).read_all("fates")
        read = [ev.GroupFate.FromString(message.data) for message in messages]
        return [(fate.group, fate.step) for fate in read if fate.fate == ev.FATE_TRAINED]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.router = Router(self.redis, self.run, await next_epoch(self.redis, self.run, "router"))
        self.bank.start()
        with _ended(self.bank):
            async with AsyncExitStack() as self._stack:
                yield


@pytest.fixture
async def world(
    tmp_path: Path, redis: Redis, run: str, redis_url: str, model: Path
) -> AsyncIterator[World]:
    made = World(tmp_path, redis, run, redis_url, model)
    async with made.running():
        yield made


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def nudge(model: Any) -> None:
    with torch.no_grad():
        next(model.parameters()).add_(0.25)


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


async def test_three_steps_reach_the_bank_the_record_and_the_engines(world: World) -> None:
    await world.replica("one")
    await world.replica("two")
    await world.groups("g-0", "g-1", "g-2")
    trained = load(world.model)
    digests = []
    async with AsyncBankClient(**world.where) as bank, AsyncPublisher(trained, bank) as publisher:
        async for batch in bank.batches(3):
            assert [sample.reward for sample in batch.samples] == [1.0, 0.0]
            assert batch.excluded == 1
            nudge(trained)
            done = await publisher.publish(step_kl=0.5)
            digests.append(done.digest)
            assert (done.version, done.serving, done.failed) == (batch.step, 2, ())
            assert await bank.acknowledge(batch) == 1
    assert world.served() == {"one": (State.SERVING, 3), "two": (State.SERVING, 3)}
    assert await world.fates() == [("g-0", 1), ("g-1", 2), ("g-2", 3)]
    records = await world.records()
    assert len(set(digests)) == 3
    told = [(r.version, r.parent, r.stage, r.step.step, r.step_kl) for r in records]
    assert told == [
        (0, -1, ev.VERSION_STAGE_DURABLE, 0, 0.0),
        *(
            (version, version - 1, stage, version, 0.5)
            for version in (1, 2, 3)
            for stage in (ev.VERSION_STAGE_TRAINED, ev.VERSION_STAGE_PUBLISHED)
        ),
    ]
    assert [p.replica for p in records[-1].publications] == ["one", "two"]


def test_the_same_from_a_plain_loop(tmp_path: Path, model: Path, redis_url: str) -> None:
    """No event loop in sight; the run is on one of its own in another thread."""
    from muster.config import RedisConfig
    from muster.streams import connect

    found: dict[str, Any] = {}

    async def around(loop_free: Any) -> None:
        async with connect(RedisConfig(url=redis_url)) as redis:
            world = World(tmp_path, redis, f"plain-{tmp_path.name}", redis_url, model)
            async with world.running():
                await world.replica("one")
                await world.groups("g-0", "g-1")
                await asyncio.to_thread(loop_free, world)
                found["served"], found["fates"] = world.served(), await world.fates()

    def loop(world: World) -> None:
        trained = load(world.model)
        with BankClient(**world.where) as bank, Publisher(trained, bank) as publisher:
            for batch in bank.batches(2):
                nudge(trained)
                assert publisher.publish().version == batch.step == publisher.version
                bank.acknowledge(batch)
            assert publisher.sync().serving == 1

    asyncio.run(around(loop))
    assert found["served"] == {"one": (State.SERVING, 2)}
    assert found["fates"] == [("g-0", 1), ("g-1", 2)]


async def test_what_was_not_acknowledged_comes_again_unchanged(world: World) -> None:
    await world.groups("g-0", "g-1")
    async with AsyncBankClient(**world.where) as bank:
        first, second = await bank.lease(), await bank.lease()
    async with AsyncBankClient(**world.where) as bank:
        again = [await bank.lease(), await bank.lease()]
    assert [batch.samples for batch in again] == [first.samples, second.samples]
    assert await world.fates() == []


async def test_a_checkpoint_is_gone_on_from(world: World, tmp_path: Path) -> None:
    await world.replica("one")
    await world.groups("g-0", "g-1", "g-2")
    trained = load(world.model)
    async with AsyncBankClient(**world.where) as bank, AsyncPublisher(trained, bank) as publisher:
        batch = await bank.lease()
        nudge(trained)
        await publisher.publish()
        folder = save(trained, tmp_path / "step-1")
        await bank.acknowledge(batch, folder)
        await bank.lease()  # the process ends before it has trained on this one
    resumed = load(folder)
    async with (
        AsyncBankClient(**world.where, resume=folder) as bank,
        AsyncPublisher(resumed, bank) as publisher,
    ):
        assert (bank.next_step, publisher.version) == (2, 1)
        batch = await bank.lease()
        assert batch.groups == ("g-1",)
        nudge(resumed)
        assert (await publisher.publish()).version == 2
        await bank.acknowledge(batch, save(resumed, tmp_path / "step-2"))
    assert await world.fates() == [("g-0", 1), ("g-1", 2)]
    with pytest.raises(InvalidInput, match="no trainer has acknowledged"):
        async with AsyncBankClient(**world.where, resume=tmp_path):
            pass


async def test_a_bank_that_lost_the_record_of_a_step_has_it_back_from_the_checkpoint(
    world: World, tmp_path: Path
) -> None:
    await world.groups("g-0", "g-1")
    async with AsyncBankClient(**world.where) as bank:
        batch = await bank.lease()
        at = bank.state(batch)
    streams = RunStreams(world.redis, world.run)
    await world.redis.delete(streams.key("batches"), streams.key("seen", "batches"))
    world.bank.end(9)
    world.bank.start()
    async with AsyncBankClient(**world.where, resume=at) as bank:
        assert (await bank.lease()).groups == ("g-1",)
    assert await world.fates() == [("g-0", 1)]


async def test_a_second_trainer_takes_the_seat_of_the_first(world: World) -> None:
    await world.replica("one")
    await world.groups("g-0")
    trained = load(world.model)
    async with AsyncBankClient(**world.where) as bank, AsyncPublisher(trained, bank) as publisher:
        batch = await bank.lease()
        async with AsyncBankClient(**world.where):
            with pytest.raises(Fenced):
                await bank.acknowledge(batch)
            nudge(trained)
            with pytest.raises(Fenced):
                await publisher.publish()
    assert world.served() == {"one": (State.SERVING, 0)}


async def test_a_replica_that_comes_late_is_sent_the_version_by_itself(world: World) -> None:
    trained = load(world.model)
    async with AsyncPublisher(trained, **world.where, replica_check_s=0.05) as publisher:
        nudge(trained)
        await world.replica("early")
        await publisher.publish()
        nudge(trained)  # what is trained meanwhile is not what it gets
        await world.replica("late")
        async with asyncio.timeout(30):
            while world.served()["late"] != (State.SERVING, 1):  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.02)
        assert publisher.version == 1
    assert world.served()["early"] == (State.SERVING, 1)


async def test_without_a_replica_it_says_so_and_the_version_stands(world: World) -> None:
    trained = load(world.model)
    settings = {"replicas_wait_s": 0.0, "replica_check_s": 60.0}
    async with AsyncPublisher(trained, **world.where, **settings) as publisher:
        nudge(trained)
        with pytest.raises(Unavailable, match="no replica has announced itself"):
            await publisher.publish()
        await world.replica("one")
        assert (await publisher.sync()).serving == 1
    assert world.served() == {"one": (State.SERVING, 1)}


async def test_a_replica_that_fails_is_told_with_its_reason(world: World) -> None:
    await world.replica("bad", Script(fail=frozenset({"receive"})))
    trained = load(world.model)
    async with AsyncPublisher(trained, **world.where) as publisher:
        nudge(trained)
        with pytest.raises(Unavailable, match=r"bad: .*asked to fail"):
            await publisher.publish()
        await world.replica("good")
        nudge(trained)
        done = await publisher.publish()
        assert (done.serving, [report.replica for report in done.failed]) == (1, ["bad"])
    assert world.served() == {"bad": (State.FENCED, 0), "good": (State.SERVING, 2)}


async def test_weights_that_are_not_the_runs_are_refused_before_anything_happens(
    world: World,
) -> None:
    other = load(world.model)
    nudge(other)
    with pytest.raises(Refused, match="begin with other weights"):
        async with AsyncPublisher(other, **world.where):
            pass
    assert await world.records() == []
    async with AsyncPublisher(load(world.model), **world.where):
        pass
    with pytest.raises(Refused, match="the run knows this version with other weights"):
        async with AsyncPublisher(other, **world.where):
            pass


async def test_values_that_are_not_finite_never_leave_the_trainer(world: World) -> None:
    await world.replica("one")
    trained = load(world.model)
    async with AsyncPublisher(trained, **world.where) as publisher:
        with torch.no_grad():
            next(trained.parameters()).fill_(float("nan"))
        with pytest.raises(InvalidInput, match="not finite"):
            await publisher.publish()
        assert publisher.version == 0
    assert [record.version for record in await world.records()] == [0]


async def test_unchanged_weights_make_no_version_where_that_is_asked(world: World) -> None:
    await world.replica("one")
    trained = load(world.model)
    async with AsyncPublisher(world.model, **world.where) as publisher:  # of the folder itself
        assert (await publisher.publish(trained, if_changed=True)).version == 0
        nudge(trained)
        assert (await publisher.publish(trained, if_changed=True)).version == 1
    assert world.served() == {"one": (State.SERVING, 1)}


async def test_a_checkpoint_told_of_is_what_an_engine_starts_from(
    world: World, tmp_path: Path
) -> None:
    await world.replica("one")
    trained = load(world.model)
    async with AsyncPublisher(trained, **world.where) as publisher:
        nudge(trained)
        await publisher.publish(step=1)
        await publisher.durable(save(trained, tmp_path / "c"))
    last = (await world.records())[-1]
    assert (last.version, last.stage) == (1, ev.VERSION_STAGE_DURABLE)
    assert last.checkpoint == str(tmp_path / "c")


async def test_more_groups_than_the_run_opens_are_refused(world: World) -> None:
    with pytest.raises(InvalidInput, match="opens no more groups"):
        async with AsyncBankClient(**world.where, groups=2):
            pass


async def test_who_knows_only_the_redis_of_a_run_gets_batches_of_that_runs_size(
    world: World, redis_url: str, tmp_path: Path
) -> None:
    """This machine's own settings say 4 groups; only two will ever be there."""
    await world.groups("g-0", "g-1")
    async with AsyncBankClient(redis_url=redis_url, run=world.run) as bank:
        assert (await bank.lease()).groups == ("g-0",)
        (tmp_path / "c").mkdir()
        await bank.acknowledge(1, str(tmp_path / "c"))
    async with AsyncBankClient(
        redis_url=redis_url, run=world.run, resume=str(tmp_path / "c")
    ) as bank:
        assert (await bank.lease()).groups == ("g-1",)


async def test_what_was_not_leased_cannot_be_acknowledged(world: World) -> None:
    await world.groups("g-0")
    async with AsyncBankClient(**world.where) as bank:
        with pytest.raises(Refused, match="no batch of this step was leased"):
            await bank.acknowledge(1)
        batch = await bank.lease()
        assert await bank.acknowledge(batch) == 1
        assert await bank.acknowledge(batch) == 1  # again, as after a lost answer
