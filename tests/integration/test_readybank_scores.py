"""Scores by idle replicas: the adapter against real replica servers, and a bank that decides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zstandard
from redis.asyncio import Redis

from muster import codec, segment_codec
from muster.registry import Entry, Registry
from muster.streams import RunStreams, StreamEntry, next_epoch
from muster.types import EpisodeKey, OutcomeLabel, SamplingParams, Segment, SegmentKind, VersionSpan
from muster.v1 import events_pb2 as ev
from muster.v1 import readybank_pb2 as rb
from services.inference.adapters.fake import FakeEngine, Script
from services.inference.engine import Sampling
from services.readybank import events as e
from services.readybank.adapters import scoring
from services.readybank.adapters.scoring import Scorer
from services.readybank.ledger import divergence
from sim.builders import scored
from tests.integration.replicas import Fleet, Process, replicas
from tests.integration.test_readybank import (
    DEADLINE_S,
    BankProcess,
    Router,
    _ended,
    _lease,
    _register,
    _stub,
)

PROMPT, SAID, SEEN, SAID_NEXT = (1, 2, 3), (7, 8, 9), (4,), (5, 6)
IDS = (*PROMPT, *SAID, *SEEN, *SAID_NEXT)


async def logprobs(version: int) -> list[float]:
    """Of every token but the first, as the engine of that version says."""
    engine = FakeEngine()
    await engine.start(version)
    return [*(await engine.score(IDS, 1.0)).logprobs]


async def turns(version: int) -> list[bytes]:
    """Payloads of two turns that this version sampled."""
    found = [0.0, *await logprobs(version)]
    said, again = found[3:6], found[7:9]
    spans = [(VersionSpan(version, 0, n, version),) for n in (3, 2)]
    first = [
        Segment(SegmentKind.PROMPT, PROMPT),
        Segment(SegmentKind.MODEL, SAID, tuple(said), spans[0]),
    ]
    second = [
        Segment(SegmentKind.OBSERVATION, SEEN),
        Segment(SegmentKind.MODEL, SAID_NEXT, tuple(again), spans[1]),
    ]
    packed = (
        ev.TurnPayload(segments=[segment_codec.segment_to_pb(s) for s in segments])
        for segments in (first, second)
    )
    return [zstandard.compress(turn.SerializeToString()) for turn in packed]


class Here:
    """Two turns of version 0 in a store, a scorer, a fleet."""

    def __init__(self, redis: Redis, run: str, fleet: Fleet):
        self.streams, self.fleet = RunStreams(redis, run), fleet
        self._registry = Registry(redis, run)
        self.patience(10.0)
        self.keys = tuple(self.streams.key("p", f"job-00000.0.0.{n}") for n in range(2))

    def patience(self, seconds: float) -> None:
        self.scorer = Scorer(self.streams, self._registry, deadline_s=seconds)

    async def score(self, version: int, tokens_max: int = 100) -> e.GroupScored | e.ScoreMissed:
        wanted = (e.ToScore(0, 0, self.keys),)
        return await self.scorer(e.ScoreGroup("job-00000", version, wanted, tokens_max))


@asynccontextmanager
async def here(redis: Redis, run: str) -> AsyncIterator[Here]:
    async with replicas(redis, run) as fleet:
        found = Here(redis, run, fleet)
        for key, payload in zip(found.keys, await turns(0), strict=True):
            await redis.set(key, payload)
        yield found


def figures(found: e.GroupScored | e.ScoreMissed) -> tuple[int, int, float]:
    assert isinstance(found, e.GroupScored), found
    (score,) = found.scores
    return score.version, score.tokens, score.kl


async def test_a_score_is_that_of_the_sampled_tokens_under_the_version_asked_for(
    redis: Redis, run: str
) -> None:
    async with here(redis, run) as it:
        await it.fleet.start("a", Script(), version=0)
        await it.fleet.start("b", Script(), version=3)
        same, other = await it.score(0), await it.score(3)
        part = await it.score(3, tokens_max=5)
    before, after = await logprobs(0), await logprobs(3)
    sampled = [2, 3, 4, 6, 7]
    kl = divergence([before[n] for n in sampled], [after[n] for n in sampled])
    assert figures(same) == (0, 5, 0.0)
    assert figures(other) == (3, 5, pytest.approx(kl, rel=1e-5))
    assert figures(part)[:2] == (3, 2)
    assert figures(part)[2] == pytest.approx(divergence(before[2:4], after[2:4]), rel=1e-5)


async def test_a_version_that_is_known_before_anybody_serves_it_is_waited_for(
    redis: Redis, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every version is: its record comes first."""
    looked = asyncio.Event()

    async def look(entry: Entry, version: int) -> bool:
        found = await is_idle(entry, version)
        looked.set()
        return found

    is_idle = scoring._is_idle
    monkeypatch.setattr(scoring, "_is_idle", look)
    async with here(redis, run) as it:
        await it.fleet.start("a", Script(), version=0)
        async with asyncio.TaskGroup() as tasks:
            scoring_it = tasks.create_task(it.score(1))
            await looked.wait()
            await it.fleet.start("b", Script(), version=1)
    assert figures(scoring_it.result())[0] == 1


async def test_nobody_is_disturbed_for_a_score(redis: Redis, run: str) -> None:
    """A replica of another version, one that works, one that is gone: it is missed, and says so."""
    async with here(redis, run) as it:
        it.patience(1.0)
        other = await it.fleet.start("a", Script(), version=1)
        busy = await it.fleet.start("b", Script(wedged=True), version=3)
        request = Sampling("x", PROMPT, SamplingParams(), max_tokens=3, stop_token_ids=())
        async with asyncio.TaskGroup() as tasks:
            works = tasks.create_task(anext(busy.engine.sample(request)))
            await asyncio.sleep(0)  # it has begun
            found = await it.score(3)
            works.cancel()
        await other.kill()
        gone = await it.score(1)
    assert isinstance(found, e.ScoreMissed)
    assert "no replica serves version 3 and is idle" in found.why
    assert isinstance(gone, e.ScoreMissed)


async def test_what_cannot_be_scored_is_missed_and_told(redis: Redis, run: str) -> None:
    async with here(redis, run) as it:
        process = await it.fleet.start("a", Script(fail=frozenset({"score"})), version=3)
        failed = await it.score(3)
        process.rescript(fail=frozenset())
        nothing = await it.score(3, tokens_max=2)
        await redis.delete(it.keys[1])
        lost = await it.score(3)
    assert isinstance(failed, e.ScoreMissed)
    assert isinstance(nothing, e.ScoreMissed)
    assert "nothing sampled" in nothing.why
    assert isinstance(lost, e.ScoreMissed)
    assert it.keys[1] in lost.why


class Untempered(Router):
    """Writes groups sampled at temperature 1 under one version, which an engine can score."""

    def __init__(self, redis: Redis, run: str, epoch: int, version: int):
        super().__init__(redis, run, epoch)
        self._version = version

    async def open(self, group: str, size: int) -> None:
        opened = ev.GroupOpened(job="job", task="task", group_size=size)
        opened.sampling.CopyFrom(codec.sampling_to_pb(SamplingParams()))
        event = ev.TrajectoryEvent(group_opened=opened)
        event.episode.CopyFrom(codec.key_to_pb(EpisodeKey(self._run, group, 0, 0, self._epoch)))
        await self._append([self._entry("events", "opened", event)])

    async def episode(
        self, group: str, sibling: int, label: OutcomeLabel, attempt: int = 0
    ) -> None:
        key = EpisodeKey(self._run, group, sibling, attempt, self._epoch)
        for number, payload in enumerate(await turns(self._version)):
            name, sampled = self._streams.key("p", f"{key.id}.{number}"), 3 - number
            turn = ev.TurnFinished(turn=number, payload_key=name, sampled_tokens=sampled)
            spans = [VersionSpan(self._version, 0, sampled, self._version)]
            turn.spans.extend(codec.spans_to_pb(spans))
            event = ev.TrajectoryEvent(episode=codec.key_to_pb(key), seq=number, turn_finished=turn)
            await self._append(
                [self._entry("events", f"{key.id}/{number}", event)], {name: payload}
            )
        over = ev.EpisodeFinished(turns=2)
        end = ev.TrajectoryEvent(episode=codec.key_to_pb(key), seq=2, episode_finished=over)
        judged = codec.label_to_pb(key, label)
        await self._append(
            [
                self._entry("events", f"{key.id}/2", end),
                self._entry("outcomes", f"{key.id}/label", judged),
            ]
        )


@pytest.mark.parametrize("fine", [True, False])
async def test_a_group_in_doubt_is_decided_on_the_measured_figure(
    tmp_path: Path, redis: Redis, run: str, redis_url: str, fine: bool
) -> None:
    """Version 3 is bounded by 0.09 from version 0, in truth by far more; of its own it is 0."""
    epoch = await next_epoch(redis, run, "router")
    streams = RunStreams(redis, run)
    for version in (1, 2, 3):
        record = ev.PolicyVersionRecord(
            version=version, parent=version - 1, stage=ev.VERSION_STAGE_PUBLISHED, step_kl=0.01
        )
        data, dedupe = record.SerializeToString(), f"{version}/{record.stage}"
        await streams.append([StreamEntry("versions", "versions", dedupe, data)])
    bank = BankProcess(tmp_path, run, redis_url)
    with bank.config.open("a") as file:
        file.write("[readybank]\nkl_refuse = 0.5\nkl_sure = 0.02\ntick_s = 0.1\n")
    # The engine that calls itself version 3 has the weights of version 0 where all is fine.
    async with replicas(redis, run) as fleet:
        process = await fleet.start("a", Script(), version=3)
        if fine:
            process.engine.score = _of_version(process, 0)  # type: ignore[method-assign]
        with _ended(bank):
            bank.start()
            async with _stub(redis, run) as stub:
                await _register(stub, run, 1)
                await Untempered(redis, run, epoch, version=0).group(
                    "job-00000", scored(1.0), scored(0.0)
                )
                if not fine:
                    await Untempered(redis, run, epoch, 3).group(
                        "job-00001", scored(1.0), scored(0.0)
                    )
                parts = [
                    rb.LeaseBatchResponse.FromString(part)
                    for part in await _lease(stub, run, 1, groups=1, deadline_s=DEADLINE_S)
                ]
                # The other group makes the batch; this one may still be asked about.
                fates = await _fates(streams, 0 if fine else 1)
    leased = parts[1].trajectory
    if fine:
        assert (leased.group, leased.scored_kl, fates) == ("job-00000", 0.0, [])
        assert leased.predicted_kl == pytest.approx(0.09)
        return
    assert (leased.group, leased.predicted_kl) == ("job-00001", 0.0)
    assert not leased.HasField("scored_kl")
    (fate,) = fates
    assert (fate.group, fate.reason) == ("job-00000", "stale_kl_scored")
    assert fate.predicted_kl == pytest.approx(0.09)
    assert fate.scored_kl > 0.02


async def _fates(streams: RunStreams, count: int) -> list[ev.GroupFate]:
    """All fates, once there are so many."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            found = [ev.GroupFate.FromString(m.data) for m in await streams.read_all("fates")]
            if len(found) >= count:
                return found
            await asyncio.sleep(0.05)


def _of_version(process: Process, version: int) -> object:
    """What that version would say, told as the version that is served."""

    async def score(token_ids: tuple[int, ...], temperature: float) -> object:
        other = FakeEngine()
        await other.start(version)
        found = await other.score(token_ids, temperature)
        return type(found)(found.logprobs, process.driver.replica.version)

    return score
