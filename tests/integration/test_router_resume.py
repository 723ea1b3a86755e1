"""A router dies at any point, or a box does: the attempt goes on, token for token."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zstandard
from redis.asyncio import Redis

from muster import journal
from muster.errors import MusterError, NotFound, Unavailable
from muster.streams import RunStreams, StreamEntry
from muster.taskset import read_task_set
from muster.v1 import common_pb2 as pb
from muster.v1 import events_pb2 as ev
from muster.v1 import inference_pb2 as inf
from muster.v1 import router_pb2 as rt
from services.router import events as e
from services.router.adapters.durable import Durable
from tests.integration.router_world import BoxHost, Router, ScriptedReplica, answer, fleet, router
from tests.integration.test_router import TASKS, complete, events, until
from tests.unit.router.test_conversation import END

TURNS = 5


def submission(**fields: Any) -> rt.SubmitTaskSetRequest:
    """One sibling whose task allows six turns."""
    task = next(t for t in read_task_set(TASKS) if "join-tables" in t.name)
    package = pb.TaskPackage(name=task.name, digest=task.digest, archive=task.archive)
    sampling = pb.SamplingParams(temperature=1.0, top_p=1.0)
    given = {"job": "job", "tasks": [package], "groups": 1, "group_size": 2, "sampling": sampling}
    return rt.SubmitTaskSetRequest(**(given | fields))


def turn_of(request: inf.GenerateRequest) -> int:
    return int(request.request_id.split(".")[-2])


def talkative(request: inf.GenerateRequest) -> list[inf.GenerateResponse]:
    """A command per turn, then DONE."""
    turn = turn_of(request)
    text = "DONE" if turn == TURNS else f"```bash\nstep {turn} of {request.episode.sibling}\n```"
    return answer([*map(ord, text), END])


class Gate:
    """Lets everything pass but the calls of turn 3, of which it tells."""

    def __init__(self, calls: int = 2):
        self.reached, self.open, self._left = asyncio.Event(), asyncio.Event(), calls

    async def __call__(self, request: Any) -> None:
        if request.turn == 3 and not self.open.is_set():
            self._left -= 1
            if self._left <= 0:
                self.reached.set()
            await self.open.wait()


class Stuck(Durable):
    """Finishes no turn from number 3 on: the router hangs between a result and its record."""

    gate: Gate

    async def record_turn(self, command: e.RecordTurn, *rest: Any) -> None:
        await self.gate(command)
        await super().record_turn(command, *rest)


@asynccontextmanager
async def talking(redis: Redis, run: str, hosts: Sequence[BoxHost]) -> Any:
    async with fleet(redis, run, hosts=hosts) as (replicas, _):
        replicas[0].spoil = talkative
        yield replicas[0]


async def trajectories(redis: Redis, run: str) -> dict[tuple[int, int], list[int]]:
    """(sibling, attempt) → all token ids of finished attempts, by their records in order."""
    streams, found = RunStreams(redis, run), dict[tuple[int, int], list[int]]()
    told = await events(redis, run)
    for event in told:
        if event.HasField("turn_finished"):
            place = (event.episode.sibling, event.episode.attempt)
            (data,) = await streams.payloads([event.turn_finished.payload_key])
            assert data is not None
            payload = ev.TurnPayload.FromString(zstandard.decompress(data))
            for segment in payload.segments:
                found.setdefault(place, []).extend(segment.token_ids)
    ended = {(x.episode.sibling, x.episode.attempt) for x in told if x.HasField("episode_finished")}
    return {place: ids for place, ids in found.items() if place in ended}


async def recorded(redis: Redis, run: str, kind: str) -> list[ev.TrajectoryEvent]:
    return [x for x in await events(redis, run) if x.HasField(kind)]  # type: ignore[arg-type]


async def figures(redis: Redis, run: str) -> list[tuple[int, ...]]:
    """What each recorded turn says of its tokens."""
    turns = [(x.episode, x.turn_finished) for x in await recorded(redis, run, "turn_finished")]
    return sorted(
        (key.sibling, t.turn, t.prompt_tokens, t.sampled_tokens, sum(s.end for s in t.spans))
        for key, t in turns
    )


async def undisturbed(redis: Redis, run: str, folder: Path) -> dict[tuple[int, int], list[int]]:
    async with talking(redis, run, [BoxHost("a")]), router(redis, run, folder) as it:
        await it.stub.SubmitTaskSet(submission(), timeout=5)
        await until(it.stub, complete)
    return await trajectories(redis, run)


async def killed_at(point: str, host: BoxHost, replica: ScriptedReplica, first: Router) -> None:
    """Submit, and return when both siblings have come to that point of turn 3."""
    gate = Gate()
    if point == "before the command runs":
        host.before = gate
    elif point == "after the command ran":
        host.after = gate
    elif point == "while the model replies":
        asked: list[str] = []

        def spoil(request: inf.GenerateRequest) -> list[inf.GenerateResponse]:
            if turn_of(request) != 3:
                return talkative(request)
            asked.append(request.request_id)
            if len(asked) >= 2:
                gate.reached.set()
            return answer([], covered=1)  # never admitted: asked for again and again

        replica.spoil = spoil
    else:
        first.driver._durable.gate = gate  # type: ignore[attr-defined]
    await first.stub.SubmitTaskSet(submission(), timeout=5)
    await asyncio.wait_for(gate.reached.wait(), 10)
    host.before = host.after = _open


async def _open(request: Any) -> None:
    return None


@pytest.mark.parametrize(
    "point",
    [
        "while the model replies",
        "before the command runs",
        "after the command ran",
        "before the turn is recorded",
    ],
)
async def test_a_router_killed_at_any_point_of_a_turn_is_followed_without_a_seam(
    redis: Redis, run: str, tmp_path: Path, point: str
) -> None:
    host = BoxHost("a")
    want = await undisturbed(redis, f"{run}-plain", tmp_path / "plain")
    kind = Stuck if point == "before the turn is recorded" else Durable
    async with talking(redis, run, [host]) as replica:
        async with router(redis, run, tmp_path, kind, generate_retries_max=99) as first:
            await killed_at(point, host, replica, first)
        replica.spoil = talkative
        async with router(redis, run, tmp_path) as second:
            progress = await until(second.stub, complete)
    assert await trajectories(redis, run) == want
    assert await figures(redis, run) == await figures(redis, f"{run}-plain")
    assert (progress.repairs, dict(progress.outcomes)) == (0, {"model_success": 2})
    assert (host.made, len(host.executed)) == (2, 2 * TURNS)
    assert len(set(host.executed)) == len(host.executed)
    assert journal.verify(second.journal).problem == ""


async def test_a_kept_result_is_recorded_as_such(redis: Redis, run: str, tmp_path: Path) -> None:
    host = BoxHost("a")
    async with talking(redis, run, [host]) as replica:
        async with router(redis, run, tmp_path) as first:
            await killed_at("after the command ran", host, replica, first)
        async with router(redis, run, tmp_path) as second:
            await until(second.stub, complete)
    turns = [x.turn_finished for x in await recorded(redis, run, "turn_finished")]
    assert [t.turn for t in turns if t.resumed] == [3, 3]


@pytest.mark.parametrize("hosts", [1, 2])
async def test_a_box_lost_at_turn_3_is_rebuilt_and_its_tokens_stay(
    redis: Redis, run: str, tmp_path: Path, hosts: int
) -> None:
    want = await undisturbed(redis, f"{run}-plain", tmp_path / "plain")
    made = [BoxHost("a"), BoxHost("b")][:hosts]
    first = made[0]

    async def lose(request: Any) -> None:
        if request.turn == 3 and request.episode.sibling == 0 and len(first.boxes) <= 2:
            first.boxes.pop(request.box, None)
            first.before = _open

    first.before = lose
    async with talking(redis, run, made) as replica, router(redis, run, tmp_path) as it:
        await it.stub.SubmitTaskSet(submission(), timeout=5)
        progress = await until(it.stub, complete)
        assert sorted(turn_of(r) for r in replica.requests) == sorted([*range(TURNS + 1)] * 2)
    assert await trajectories(redis, run) == want
    assert (progress.repairs, dict(progress.outcomes)) == (1, {"model_success": 2})
    (told,) = [x.box_restored for x in await recorded(redis, run, "box_restored")]
    assert (told.repair, told.lost_host, told.turns_replayed) == (1, "h0", 3)
    assert [fresh for host in made for fresh in host.fresh] == [False, False, True]
    ran = [place for host in made for place in host.executed]
    assert len(set(ran)) == len(ran) == 2 * TURNS + 3


async def test_a_box_that_cannot_be_rebuilt_leaves_one_trajectory_of_a_new_attempt(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    host = BoxHost("a")
    host.prints = lambda request: f"the time is {len(host.executed)}"

    async def lose(request: Any) -> None:
        if request.turn == 3:
            host.boxes.clear()
            host.before = _open

    host.before = lose
    one = submission(group_size=2)
    async with talking(redis, run, [host]), router(redis, run, tmp_path) as it:
        await it.stub.SubmitTaskSet(one, timeout=5)
        await until(it.stub, complete)
    labels = [
        ev.OutcomeLabel.FromString(m.data)
        for m in await RunStreams(redis, run).read_all("outcomes")
    ]
    good = {x.episode.sibling: x.episode.attempt for x in labels if x.outcome < 3}
    assert sorted(good) == [0, 1]
    assert {x.cause for x in labels if x.episode.attempt == 0} == {"replay_differs"}
    assert len(labels) == 4


@pytest.mark.parametrize(
    ("error", "outcomes"),
    [
        (NotFound("lost with the result of its step", field="box"), {"model_failure": 1}),
        (Unavailable("Socket closed"), {"infra_failure": 3}),
    ],
    ids=["their own word", "out of reach"],
)
async def test_a_command_that_takes_two_hosts_with_it_is_the_models_failure(
    redis: Redis, run: str, tmp_path: Path, error: MusterError, outcomes: dict[str, int]
) -> None:
    async def die(request: Any) -> None:
        if request.turn == 3 and request.episode.sibling == 0:
            raise error

    hosts = [BoxHost("a"), BoxHost("b")]
    for host in hosts:
        host.before = die
    async with talking(redis, run, hosts), router(redis, run, tmp_path) as it:
        await it.stub.SubmitTaskSet(submission(), timeout=5)
        progress = await until(it.stub, complete)
    assert dict(progress.outcomes) == {**outcomes, "model_success": 1}
    found = await RunStreams(redis, run).read_all("outcomes")
    labels = [ev.OutcomeLabel.FromString(m.data) for m in found]
    causes = {"model_failure": "command_kills_hosts", "infra_failure": "host_lost"}
    (blamed,) = outcomes
    assert {x.cause for x in labels if x.episode.sibling == 0} == {causes[blamed]}


async def test_a_payload_that_is_gone_ends_its_attempt_by_name(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    host = BoxHost("a")
    async with talking(redis, run, [host]) as replica:
        async with router(redis, run, tmp_path) as first:
            await killed_at("before the command runs", host, replica, first)
        await redis.delete(RunStreams(redis, run).key("p", "job-00000.0.0.1"))
        await redis.delete(RunStreams(redis, run).key("o", "job-00000.1.0.2"))
        async with router(redis, run, tmp_path) as second:
            progress = await until(second.stub, complete)
    assert dict(progress.outcomes) == {"infra_failure": 2, "model_success": 2}
    found = await RunStreams(redis, run).read_all("outcomes")
    labels = [ev.OutcomeLabel.FromString(m.data) for m in found]
    lost = sorted(x.detail for x in labels if x.cause == "record_lost")
    assert lost == [
        "the output of turn 2 are not in Redis any more",
        "the tokens of turn 1 are not in Redis any more",
    ]


async def test_a_payload_that_cannot_be_read_ends_its_attempt_by_name(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    host = BoxHost("a")
    key = RunStreams(redis, run).key("p", "job-00000.0.0.1")
    async with talking(redis, run, [host]) as replica:
        async with router(redis, run, tmp_path) as first:
            await killed_at("before the command runs", host, replica, first)
        await redis.set(key, b"junk")
        async with router(redis, run, tmp_path) as second:
            progress = await until(second.stub, complete)
    assert dict(progress.outcomes) == {"infra_failure": 1, "model_success": 2}
    found = await RunStreams(redis, run).read_all("outcomes")
    labels = [ev.OutcomeLabel.FromString(m.data) for m in found]
    (lost,) = [x.detail for x in labels if x.cause == "record_lost"]
    assert f"'{key}': a payload cannot be read" in lost


async def test_entries_that_cannot_be_read_are_put_aside_and_stop_nobody(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    streams = RunStreams(redis, run)
    for stream in ("events", "outcomes", "fates", "jobs", "versions"):
        await streams.append([StreamEntry(stream, "rubbish", stream, b"\xff\xff rubbish")])
    for _ in range(2):
        async with talking(redis, run, [BoxHost("a")]), router(redis, run, tmp_path) as it:
            await it.stub.SubmitTaskSet(submission(), timeout=5)
            await until(it.stub, complete)
    found = await redis.xrange(streams.key("dead"))
    told = sorted(fields[b"stream"].decode() for _, fields in found)
    assert told == ["events", "fates", "jobs", "outcomes", "versions"]
    assert all(fields[b"d"] == b"\xff\xff rubbish" and fields[b"reason"] for _, fields in found)


async def test_retired_groups_are_left_alone(redis: Redis, run: str, tmp_path: Path) -> None:
    streams = RunStreams(redis, run)
    async with talking(redis, run, [BoxHost("a")]):
        async with router(redis, run, tmp_path) as first:
            await first.stub.SubmitTaskSet(submission(), timeout=5)
            await until(first.stub, complete)
        payloads = await redis.keys(streams.key("[po]", "*"))
        totals = {"trained": 1, "episodes": 2, "turns": 12, "outcome:model_success": 2}
        await streams.retire("job-00000", job="job", index=0, totals=totals, delete=payloads)
        await redis.hset(streams.key("mark"), "step", "4")
        async with router(redis, run, tmp_path) as second:
            got = await second.stub.GetJob(rt.GetJobRequest(job="job"), timeout=5)
            # Four steps are trained and no version is published since: nothing new may begin.
            await second.stub.SubmitTaskSet(submission(job="next"), timeout=5)
            await until(second.stub, lambda p: p.waiting_for.startswith("the trainer: "), "next")
    progress = got.progress
    assert (progress.groups_trained, progress.episodes_finished, progress.turns) == (1, 2, 12)
    assert progress.state == rt.JOB_STATE_DONE
    assert dict(progress.outcomes) == {"model_success": 2}
