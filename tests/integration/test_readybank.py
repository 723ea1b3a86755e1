"""The bank as a process on a real server: leases, kills, acknowledgements, fates, journal."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest
import zstandard
from redis.asyncio import Redis

from muster import codec, journal, payload, segment_codec
from muster.config import RedisConfig
from muster.errors import Fenced, InvalidInput, MusterError, Refused, Unavailable
from muster.registry import Registry
from muster.rpc import calling, channel
from muster.streams import RunStreams, StreamEntry, connect, next_epoch
from muster.types import EpisodeKey, OutcomeLabel, SamplingParams, Segment, SegmentKind, VersionSpan
from muster.v1 import events_pb2 as ev
from muster.v1 import readybank_pb2 as rb
from muster.v1.readybank_pb2_grpc import ReadyBankServiceStub
from sim.builders import INFRA, scored

if TYPE_CHECKING:
    from muster.v1.readybank_pb2_grpc import ReadyBankServiceAsyncStub


class OwnRedis(Protocol):
    """A server of the test's own."""

    url: str

    def start(self) -> None: ...
    def kill(self) -> None: ...


DEADLINE_S = 30.0


class Router:
    """Writes a run's streams the way the router does."""

    def __init__(self, redis: Redis, run: str, epoch: int):
        self._streams = RunStreams(redis, run, role="router", epoch=epoch)
        self._run, self._epoch = run, epoch

    async def open(self, group: str, size: int) -> None:
        opened = ev.GroupOpened(
            job=group.rpartition("-")[0], task=f"task-of-{group}", group_size=size
        )
        opened.sampling.CopyFrom(codec.sampling_to_pb(SamplingParams(0.7, 1.0, 0, 5)))
        event = ev.TrajectoryEvent(group_opened=opened)
        event.episode.CopyFrom(codec.key_to_pb(EpisodeKey(self._run, group, 0, 0, self._epoch)))
        await self._append([self._entry("events", "opened", event)])

    async def episode(
        self, group: str, sibling: int, label: OutcomeLabel, attempt: int = 0
    ) -> None:
        """Two turns, then the end and the label in one call."""
        key = EpisodeKey(self._run, group, sibling, attempt, self._epoch)
        for number in range(2):
            name = self._streams.key("p", f"{key.id}.{number}")
            turn = ev.TurnFinished(turn=number, payload_key=name, sampled_tokens=3)
            turn.spans.extend(codec.spans_to_pb([VersionSpan(0, 0, 3, 0)]))
            event = ev.TrajectoryEvent(episode=codec.key_to_pb(key), seq=number, turn_finished=turn)
            entry = self._entry("events", f"{key.id}/{number}", event)
            await self._append([entry], {name: _payload(sibling, number)})
        end = ev.TrajectoryEvent(
            episode=codec.key_to_pb(key), seq=2, episode_finished=ev.EpisodeFinished(turns=2)
        )
        await self._append(
            [
                self._entry("events", f"{key.id}/2", end),
                self._entry("outcomes", f"{key.id}/label", codec.label_to_pb(key, label)),
            ]
        )

    async def group(self, group: str, *labels: OutcomeLabel) -> None:
        await self.open(group, len(labels))
        for sibling, label in enumerate(labels):
            await self.episode(group, sibling, label)

    def _entry(
        self, stream: str, dedupe: str, message: ev.TrajectoryEvent | ev.OutcomeLabel
    ) -> StreamEntry:
        scope, needs = f"g:{message.episode.group}", "" if dedupe == "opened" else "opened"
        return StreamEntry(stream, scope, dedupe, message.SerializeToString(), needs=needs)

    async def _append(
        self, entries: list[StreamEntry], payloads: dict[str, bytes] | None = None
    ) -> None:
        await self._streams.append(entries, payloads)


def _segments(sibling: int, turn: int) -> list[Segment]:
    first = SegmentKind.PROMPT if turn == 0 else SegmentKind.OBSERVATION
    sampled = (10 * sibling + turn, 2, 3)
    return [
        Segment(first, (7, turn)),
        Segment(SegmentKind.MODEL, sampled, (-0.5, -1.0, -0.25), (VersionSpan(0, 0, 3, 0),)),
    ]


def _payload(sibling: int, turn: int) -> bytes:
    segments = [segment_codec.segment_to_pb(s) for s in _segments(sibling, turn)]
    plain = ev.TurnPayload(segments=segments).SerializeToString()
    return zstandard.ZstdCompressor().compress(plain)


class BankProcess:
    """`python -m services.readybank` that a test may kill."""

    def __init__(self, folder: Path, run: str, redis_url: str):
        self.config = folder / "muster.toml"
        self.state = folder / "state"
        self.config.write_text(
            f'run = "{run}"\nstate_dir = "{self.state}"\n[redis]\nurl = "{redis_url}"\n'
        )
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "services.readybank", "--config", str(self.config)]
        with (self.config.parent / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log, process_group=0)

    def end(self, number: signal.Signals) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)
        return self.process.wait(timeout=10)


@contextmanager
def _ended(bank: BankProcess) -> Iterator[None]:
    try:
        yield
    finally:
        bank.end(signal.SIGKILL)


@asynccontextmanager
async def _stub(
    redis: Redis, run: str, after: str = ""
) -> AsyncIterator[ReadyBankServiceAsyncStub]:
    """A stub of the bank that announced itself, other than `after`."""
    registry = Registry(redis, run)
    async with asyncio.timeout(DEADLINE_S):
        while True:
            found = [entry for entry in await registry.list("readybank") if entry.id > after]
            if found:
                break
            await asyncio.sleep(0.02)
    async with channel(found[-1].address) as opened:
        stub: ReadyBankServiceAsyncStub = ReadyBankServiceStub(opened)
        yield stub


async def _lease(
    stub: ReadyBankServiceAsyncStub,
    run: str,
    step: int,
    *,
    epoch: int = 1,
    groups: int = 2,
    deadline_s: float = DEADLINE_S,
) -> list[bytes]:
    """The parts of a lease as bytes, header first."""
    request = rb.LeaseBatchRequest(run=run, trainer_epoch=epoch, step=step, groups=groups)
    with calling("lease"):
        call = stub.LeaseBatch(request, timeout=deadline_s)
        return [part.SerializeToString(deterministic=True) async for part in call]


async def _acknowledge(stub: ReadyBankServiceAsyncStub, run: str, step: int, epoch: int = 1) -> int:
    request = rb.AcknowledgeBatchRequest(run=run, trainer_epoch=epoch, step=step)
    with calling("acknowledge"):
        return (await stub.AcknowledgeBatch(request, timeout=DEADLINE_S)).groups_trained


async def _register(
    stub: ReadyBankServiceAsyncStub, run: str, epoch: int, durable: int = 0
) -> rb.RegisterTrainerResponse:
    request = rb.RegisterTrainerRequest(run=run, trainer_epoch=epoch, last_durable_step=durable)
    with calling("register"):
        return await stub.RegisterTrainer(request, timeout=DEADLINE_S)


def _content(parts: list[bytes]) -> list[bytes]:
    """Without how many groups may still go back: none, of a batch that was trained once."""
    header = rb.LeaseBatchResponse.FromString(parts[0])
    header.ClearField("returns_left")
    return [header.SerializeToString(), *parts[1:]]


async def test_a_batch_survives_two_kills_byte_for_byte(
    tmp_path: Path, redis: Redis, run: str, redis_url: str
) -> None:
    router = Router(redis, run, await next_epoch(redis, run, "router"))
    await router.group("g-0", scored(1.0), scored(0.0), INFRA)
    await router.episode("g-0", 2, INFRA, attempt=2)
    await router.group("g-1", scored(0.0), scored(0.0))
    bank = BankProcess(tmp_path, run, redis_url)
    with _ended(bank):
        bank.start()
        async with _stub(redis, run) as stub:
            assert (await _register(stub, run, 1)).next_step == 1
            first = await _lease(stub, run, 1)
        bank.end(signal.SIGKILL)
        await router.episode("g-1", 0, scored(1.0), attempt=1)  # too late: it is in a batch
        bank.start()
        async with _stub(redis, run, after="bank-1") as stub:
            assert await _lease(stub, run, 1) == first
            assert await _acknowledge(stub, run, 1) == 2
            assert await _acknowledge(stub, run, 1) == 2
        bank.end(signal.SIGKILL)
        bank.start()
        async with _stub(redis, run, after="bank-2") as stub:
            again = await _register(stub, run, 2)
            assert (list(again.steps_unseen), again.next_step) == ([1], 1)
            assert _content(await _lease(stub, run, 1, epoch=2)) == _content(first)
            with pytest.raises(Fenced):
                await _lease(stub, run, 1, epoch=1)
        assert bank.end(signal.SIGTERM) == 0
    _check_parts(first, run)
    streams = RunStreams(redis, run)
    fates = [ev.GroupFate.FromString(m.data) for m in await streams.read_all("fates")]
    assert [(f.group, f.fate, f.step) for f in fates] == [
        ("g-0", ev.FATE_TRAINED, 1),
        ("g-1", ev.FATE_TRAINED, 1),
    ]
    batches = [ev.BatchRecord.FromString(m.data) for m in await streams.read_all("batches")]
    assert [b.stage for b in batches] == [ev.BATCH_STAGE_FROZEN, ev.BATCH_STAGE_TRAINED]
    for path in sorted((bank.state / "journal").iterdir()):
        replay = journal.verify(path)
        assert replay.events
        assert not replay.problem


def _check_parts(parts: list[bytes], run: str) -> None:
    header, *rest = [rb.LeaseBatchResponse.FromString(part) for part in parts]
    assert header.header.run == run
    assert [(m.group, list(m.attempts)) for m in header.header.members] == [
        ("g-0", [0, 0, 2]),
        ("g-1", [0, 0]),
    ]
    found = [part.trajectory for part in rest]
    assert [(t.group, t.sibling, t.attempt) for t in found] == [
        ("g-0", 0, 0),
        ("g-0", 1, 0),
        ("g-0", 2, 2),
        ("g-1", 0, 0),
        ("g-1", 1, 0),
    ]
    for one in found:
        invalid = (one.group, one.sibling) == ("g-0", 2)
        wanted = [] if invalid else _segments(one.sibling, 0) + _segments(one.sibling, 1)
        turns = [payload.unpacked(turn.key, turn.payload) for turn in one.turns]
        assert [segment_codec.segment_from_pb(s) for turn in turns for s in turn.segments] == wanted
        assert one.task == f"task-of-{one.group}"
        assert one.sampling.seed == 5
    assert codec.label_from_pb(found[2].label) == INFRA


async def test_a_waiting_lease_is_served_when_the_group_is_whole(
    tmp_path: Path, redis: Redis, run: str, redis_url: str
) -> None:
    router = Router(redis, run, await next_epoch(redis, run, "router"))
    bank = BankProcess(tmp_path, run, redis_url)
    with _ended(bank):
        bank.start()
        async with _stub(redis, run) as stub:
            await _register(stub, run, 1)
            with pytest.raises(Unavailable):  # its own deadline bounds it, and nothing is frozen
                await _lease(stub, run, 1, groups=1, deadline_s=0.3)
            request = rb.LeaseBatchRequest(run=run, trainer_epoch=1, step=1, groups=1)
            call = stub.LeaseBatch(request, timeout=DEADLINE_S)
            await router.group("filtered", scored(1.0), INFRA)
            await router.episode("filtered", 1, INFRA, attempt=2)
            await router.group("whole", scored(1.0), scored(0.0))
            parts = [part async for part in call]
    header = parts[0].header
    assert [m.group for m in header.members] == ["whole"]
    assert header.asked_unix_s <= header.complete_unix_s
    fates = await RunStreams(redis, run).read_all("fates")
    (fate,) = [ev.GroupFate.FromString(m.data) for m in fates]
    assert (fate.group, fate.fate) == ("filtered", ev.FATE_FILTERED)
    assert fate.reason == "too_few_valid (1 of 2)"


async def test_wrong_calls_name_the_field_and_the_way_out(
    tmp_path: Path, redis: Redis, run: str, redis_url: str
) -> None:
    cases: list[tuple[type[MusterError], str, str, int, int, int]] = [
        (InvalidInput, "run", "another", 1, 1, 1),
        (InvalidInput, "trainer_epoch", run, 0, 1, 1),
        (InvalidInput, "step", run, 1, 0, 1),
        (InvalidInput, "groups", run, 1, 1, 0),
        (Refused, "step", run, 1, 2, 1),
    ]
    bank = BankProcess(tmp_path, run, redis_url)
    with _ended(bank):
        bank.start()
        async with _stub(redis, run) as stub:
            await _register(stub, run, 1)
            for kind, field, name, epoch, step, groups in cases:
                with pytest.raises(kind) as caught:
                    await _lease(stub, name, step, epoch=epoch, groups=groups)
                assert caught.value.field == field
                assert caught.value.way_out


async def test_lost_tokens_are_told_and_never_shortened(
    tmp_path: Path, redis: Redis, run: str, redis_url: str
) -> None:
    router = Router(redis, run, await next_epoch(redis, run, "router"))
    await router.group("g", scored(1.0), scored(0.0))
    lost = RunStreams(redis, run).key("p", "g.1.0.1")
    await redis.delete(lost)
    bank = BankProcess(tmp_path, run, redis_url)
    with _ended(bank):
        bank.start()
        async with _stub(redis, run) as stub:
            await _register(stub, run, 1)
            with pytest.raises(Refused) as caught:
                await _lease(stub, run, 1, groups=1)
    assert caught.value.value == lost


async def test_a_former_bank_stops(tmp_path: Path, redis: Redis, run: str, redis_url: str) -> None:
    router = Router(redis, run, await next_epoch(redis, run, "router"))
    await router.group("g", scored(1.0), scored(0.0))
    bank = BankProcess(tmp_path, run, redis_url)
    with _ended(bank):
        bank.start()
        async with _stub(redis, run) as stub:
            await _register(stub, run, 1)
            await next_epoch(redis, run, "readybank")
            with pytest.raises(Unavailable):
                await _lease(stub, run, 1, groups=1)
        assert bank.process is not None
        assert bank.process.wait(timeout=10) == 2
    assert not await RunStreams(redis, run).read_all("batches")
    assert "a newer readybank owns run" in (tmp_path / "log").read_text()


async def test_a_restart_of_redis_is_nothing_the_trainer_notices(
    tmp_path: Path, run: str, own_redis: OwnRedis
) -> None:
    """Kill the server while a lease waits; what it had written is there again, so the bank stays
    (below `always` it may have forgotten something: tests/integration/test_leader_server.py)."""
    own_redis.start()
    async with connect(RedisConfig(url=own_redis.url)) as redis:
        await redis.config_set("appendfsync", "always")
        router = Router(redis, run, await next_epoch(redis, run, "router"))
        await router.group("before", scored(1.0), scored(0.0))
        bank = BankProcess(tmp_path, run, own_redis.url)
        with bank.config.open("a") as config:
            config.write('appendfsync = "always"\n')
        with _ended(bank):
            bank.start()
            async with _stub(redis, run) as stub:
                await _register(stub, run, 1)
                async with asyncio.TaskGroup() as tasks:
                    lease = tasks.create_task(_lease(stub, run, 1))
                    own_redis.kill()
                    own_redis.start()
                    async with connect(RedisConfig(url=own_redis.url)) as fresh:
                        router = Router(fresh, run, 1)
                        await router.group("after", scored(1.0), scored(0.0))
                header = rb.LeaseBatchResponse.FromString(lease.result()[0]).header
    assert [m.group for m in header.members] == ["before", "after"]
