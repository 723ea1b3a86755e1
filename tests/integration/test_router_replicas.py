"""Replicas that die, hang, crawl or come back as others, under a router with several of them.

Each replica says something of its own, so that every recorded token tells who sampled it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from redis.asyncio import Redis

from muster import journal, segment_codec
from muster.audit import audit
from muster.payload import plain
from muster.record import read_record
from muster.streams import RunStreams
from muster.taskset import read_task_set
from muster.v1 import common_pb2 as pb
from muster.v1 import events_pb2 as ev
from muster.v1 import router_pb2 as rt
from services.inference.adapters.fake import Script
from tests.integration.replicas import Fleet, Process, replicas
from tests.integration.router_world import BoxHost, Router, fleet, router
from tests.integration.test_router import complete, events, submission, until
from tests.unit.router.test_conversation import END
from tests.versions import append_version

TASKS = Path(__file__).parents[2] / "tasks"
RULES = {
    "probes": True,
    "admission": "kv_fit",
    "placement": "predicted_finish",
    "reserve_tokens": 500,
    "wedge_s": 2.5,
    "probe_timeout_s": 1.0,
    "probe_pause_s": 0.2,
    "groups_per_batch": 100,
    "generate_timeout_s": 60.0,
    "context_tokens_max": 1 << 14,
}
GROUPS, SIZE = 3, 4


def saying(name: str, *, step_s: float = 0.01, **change: object) -> Script:
    """A script whose every reply is one command that names the replica."""
    reply = (*map(ord, f"```bash\necho {name}\n```"), END)
    return Script(replies=(reply,), step_s=step_s, **change)  # type: ignore[arg-type]


class World:
    """Two replicas, a host, a router."""

    def __init__(self, redis: Redis, run: str, it: Router, started: Fleet, both: list[Process]):
        self.redis, self.run, self.it, self.fleet = redis, run, it, started
        self.first, self.second = both

    async def submit(self, *, groups: int = GROUPS) -> None:
        task = next(t for t in read_task_set(TASKS) if t.name.endswith("tidy-log"))
        package = pb.TaskPackage(name=task.name, digest=task.digest, archive=task.archive)
        asked = submission(tasks=[package], groups=groups, group_size=SIZE)
        await self.it.stub.SubmitTaskSet(asked, timeout=5)

    async def until(self, check: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not check():  # noqa: ASYNC110 - of another process's state there is no event
                await asyncio.sleep(0.01)

    async def in_the_middle(self, *, groups: int = GROUPS) -> None:
        """Submit: turns are recorded, and replies stand in their middle on both, until `go_on`."""
        engines = [process.engine for process in (self.first, self.second)]
        for engine in engines:
            engine.stop_after(2)
        await self.submit(groups=groups)
        await self.until(lambda: all(engine.stopped for engine in engines))
        async with asyncio.timeout(60):
            while len(await self.turns()) < 2:  # noqa: ASYNC110 - told by a stream, read from its start
                await asyncio.sleep(0.01)

    def go_on(self) -> None:
        """Finish the replies that stand."""
        for process in (self.first, self.second):
            process.engine.go_on()

    async def finished(self) -> rt.JobProgress:
        return await until(self.it.stub, complete)

    async def turns(self) -> list[ev.TurnFinished]:
        return [
            e.turn_finished
            for e in await events(self.redis, self.run)
            if e.HasField("turn_finished")
        ]

    async def said(self) -> dict[str, str]:
        """Of each recorded turn, with the replica that its record names, the sampled text."""
        streams = RunStreams(self.redis, self.run)
        found: dict[str, str] = {}
        for event in await events(self.redis, self.run):
            if not event.HasField("turn_finished"):
                continue
            place, turn = event.episode, event.turn_finished
            name = f"{place.group}.{place.sibling}.{place.attempt}.{turn.turn}"
            key = streams.key("p", name)
            [data] = await streams.payloads([key])
            assert data is not None
            segments = ev.TurnPayload.FromString(plain(key, data)).segments
            sampled = [s for s in segments if s.kind == pb.SEGMENT_KIND_MODEL]
            assert len(sampled) == 1, f"{name} holds {len(sampled)} replies"
            found[f"{name}@{turn.replica}"] = "".join(map(chr, _ids(sampled[0])))
        return found


def _ids(segment: pb.Segment) -> tuple[int, ...]:
    return segment_codec.segment_from_pb(segment).token_ids


@asynccontextmanager
async def world(
    redis: Redis, run: str, folder: Path, *, version: int = 0, **rules: object
) -> AsyncIterator[World]:
    host = BoxHost("h")
    async with fleet(redis, run, replicas=0, hosts=[host]), replicas(redis, run) as started:
        both = [await started.start(name, saying(name), version) for name in ("r1", "r2")]
        async with router(redis, run, folder, **(RULES | rules)) as it:
            there = World(redis, run, it, started, both)
            await there.until(lambda: all(_probed(process) for process in both))
            yield there


async def assert_whole(there: World, progress: rt.JobProgress, groups: int = GROUPS) -> None:
    """Nobody was relaunched, every recorded token is of who is named, the record adds up."""
    assert progress.outcomes == {"model_success": groups * SIZE}
    assert progress.repairs == 0
    keys = [e.episode for e in await events(there.redis, there.run) if e.HasField("turn_finished")]
    assert {key.attempt for key in keys} == {0}
    for name, text in (await there.said()).items():
        assert f"echo {name.rpartition('@')[2]}\n" in text, name
    record = await read_record(there.redis, there.run, Path("/nonexistent"))
    assert [str(found) for found in audit(record).problems] == []
    assert journal.verify(there.it.journal).problem == ""


async def test_a_replica_killed_in_the_middle_costs_no_episode(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    async with world(redis, run, tmp_path) as there:
        await there.in_the_middle()
        await there.first.kill()
        there.go_on()
        before = len([t for t in await there.turns() if t.replica == "r1"])
        progress = await there.finished()
        await assert_whole(there, progress)
        after = len([t for t in await there.turns() if t.replica == "r1"])
        assert after - before <= SIZE * GROUPS  # answers that had come already
        assert there.second.engine.load().running == 0


async def test_a_wedge_that_still_answers_is_left_and_nothing_decodes_there_for_nobody(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    async with world(redis, run, tmp_path) as there:
        await there.in_the_middle()
        there.first.rescript(wedged=True)
        there.go_on()
        progress = await there.finished()
        await assert_whole(there, progress)
        await there.until(lambda: not there.first.driver.replica.requests)
        assert there.first.engine.load().running == 0


async def test_a_replica_that_has_recovered_is_probed_and_takes_turns_again(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    async with world(redis, run, tmp_path, episodes_max=8) as there:
        # more than run at once: new ones are launched all the time
        await there.in_the_middle(groups=12)
        there.first.rescript(wedged=True)
        there.go_on()
        await there.until(lambda: not there.first.driver.replica.requests)
        seen = len(there.first.engine.asked)
        there.first.rescript(wedged=False)
        await there.until(lambda: there.first.engine.turns(seen) > 0)
        assert "/probe." in there.first.engine.asked[seen]
        progress = await there.finished()
        await assert_whole(there, progress, groups=12)


def _probed(process: Process, since: int = 0) -> bool:
    """A probe has come, and has its answer."""
    idle = process.engine.load().running == 0
    return idle and any("/probe." in name for name in process.engine.asked[since:])


async def test_a_restart_under_the_same_id_is_proven_before_it_takes_a_turn(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    async with world(redis, run, tmp_path) as there:
        await there.in_the_middle(groups=8)
        await there.first.kill()
        there.go_on()
        again = await there.fleet.start("r1", saying("r1"))
        progress = await there.finished()
        await assert_whole(there, progress, groups=8)
    assert "/probe." in again.engine.asked[0]
    assert again.engine.turns() > 0


async def test_a_restart_with_old_weights_takes_no_turn(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    for stage in (ev.VERSION_STAGE_DURABLE, ev.VERSION_STAGE_PUBLISHED):
        record = ev.PolicyVersionRecord(version=1, parent=0, stage=stage, checkpoint="one")
        await append_version(redis, run, record)
    async with world(redis, run, tmp_path, version=1) as there:
        await there.in_the_middle()
        await there.first.kill()
        there.go_on()
        again = await there.fleet.start("r1", saying("r1"), version=0)
        progress = await there.finished()
        await assert_whole(there, progress)
    assert again.engine.asked == []


async def test_a_slow_replica_gets_no_new_conversations(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    async with world(redis, run, tmp_path, episodes_max=6) as there:
        there.first.rescript(step_s=0.05)
        there.second.rescript(step_s=0.002)
        await there.submit(groups=16)
        await there.finished()
        firsts = [t.replica for t in await there.turns() if t.turn == 0]
    assert set(firsts[-2 * SIZE :]) == {"r2"}
    assert firsts.count("r1") >= 2  # it was tried


async def test_siblings_find_their_prompt_in_the_cache(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    async with world(redis, run, tmp_path) as there:
        await there.submit()
        await there.finished()
        turns = await there.turns()
    cached = sum(t.cached_tokens for t in turns)
    assert cached > 0.9 * sum(t.prompt_tokens for t in turns) * (1 - 2 / len(turns))


async def test_a_probes_tokens_are_in_no_record(redis: Redis, run: str, tmp_path: Path) -> None:
    async with world(redis, run, tmp_path) as there:
        await there.submit()
        progress = await there.finished()
        await assert_whole(there, progress)
        groups = {e.episode.group for e in await events(redis, run)}
    assert groups == {f"job-{number:05d}" for number in range(GROUPS)}
