"""The trainer's tracker on a real server of streams: what is durable is tracked, once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from redis.asyncio import Redis

from muster import evaluated_codec, served
from muster.errors import Unavailable
from muster.evaluated import EvaluatedGroup
from muster.fingerprint import ServingFingerprint
from muster.streams import RunStreams, StreamEntry, next_epoch
from muster.tasks import end
from muster.tracking import Row
from muster.tracking_files import BOARDS, STEPS, Tracked, read_rows, read_served
from muster.v1 import common_pb2 as pb
from muster.v1 import events_pb2 as ev
from services.trainer.adapters.tracker import Tracker
from sim.builders import scored
from tests.integration.test_readybank import Router
from tests.unit.evaluation.event_files import scalars
from tests.unit.evaluation.test_figures import FAILED, PASSED, group, sibling
from tests.unit.evaluation.test_tracking import made, published


class Run:
    """Writes what trainer, bank and router of a run would."""

    def __init__(self, redis: Redis, run: str):
        self._streams, self.redis, self.run = RunStreams(redis, run), redis, run

    async def version(self, *records: ev.PolicyVersionRecord) -> None:
        for record in records:
            name = f"{record.version}/{record.stage}"
            await self._put("versions", name, record.SerializeToString())

    async def batch(self, step: int, groups: int) -> None:
        router = Router(self.redis, self.run, await next_epoch(self.redis, self.run, "router"))
        for number in range(groups):
            await router.group(f"t-{step}{number}", scored(1.0), scored(0.0))
        members = [ev.BatchMember(group=f"t-{step}{n}", attempts=[0, 0]) for n in range(groups)]
        record = ev.BatchRecord(run=self.run, step=step, stage=ev.BATCH_STAGE_FROZEN)
        record.members.extend(members)
        record.asked_unix_s, record.complete_unix_s = 100.0, 107.5
        await self._put("batches", f"{step}/frozen", record.SerializeToString())

    async def job(self, name: str, groups: int, purpose: pb.JobPurpose.ValueType) -> None:
        record = ev.JobRecord(
            job=name, groups=groups, group_size=2, purpose=purpose, submitted_unix_s=100.0
        )
        record.sampling.CopyFrom(pb.SamplingParams(temperature=0.5, top_p=1.0))
        await self._put("jobs", name, record.SerializeToString())

    async def evaluated(self, job: str, name: str, version: int) -> None:
        siblings = [
            sibling(label, n, versions=(version,)) for n, label in enumerate((PASSED, FAILED))
        ]
        one = group(name, *siblings)
        found = EvaluatedGroup(f"{job}-{name}", job, name, one.sampling, 1.0, 9.0, one.siblings)
        data = evaluated_codec.to_pb(self.run, found).SerializeToString()
        await self._put("evaluations", found.group, data)

    async def _put(self, stream: str, name: str, data: bytes) -> None:
        await self._streams.append([StreamEntry(stream, stream, name, data)])


async def tracked_until(run: Run, folder: Path, rows: int) -> list[Row]:
    """What a trainer's process tracks until there are so many rows; then it stops."""
    tracker = Tracker(run.redis, run.run, folder)
    async with asyncio.TaskGroup() as tasks, asyncio.timeout(30):
        following = tasks.create_task(tracker.run(), name="tracking")
        while True:
            if len(read_rows(folder / STEPS)) >= rows:
                break
            await asyncio.sleep(0.02)
        await end(following)
    await tracker.last(20)
    return read_rows(folder / STEPS)


async def test_steps_batches_publications_and_evaluations_are_tracked_once_over_a_restart(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    it, folder = Run(redis, run), tmp_path / "tracking" / run
    kind = ServingFingerprint(engine="fake", dtype="float32")
    await served.record(redis, run, kind)
    await it.job("t", 4, pb.JOB_PURPOSE_TRAIN)
    await it.job("v", 2, pb.JOB_PURPOSE_EVALUATE)
    await it.batch(1, groups=2)
    await it.version(made(1, 1, 0), published(1, 1))
    await it.evaluated("v", "a", 1)
    first = await tracked_until(it, folder, 2)
    assert [(row.kind, row.step) for row in first] == [("step", 1), ("publication", 1)]
    figures = first[0].figures
    assert figures["batch/time_to_trainable_batch_s"] == 7.5
    assert (figures["batch/pass_rate"], figures["batch/reward_mean"]) == (0.5, 0.5)
    assert figures["batch/sampled_tokens_mean"] == 6.0
    assert figures["train/clipped_share"] == 0.25
    # While no trainer is there, its own last record and the rest of the evaluation come.
    await it.version(made(2, 2, 1))
    await it.evaluated("v", "b", 1)
    again = await tracked_until(it, folder, 4)
    assert [row.key for row in again[:2]] == [row.key for row in first]
    assert {row.key for row in again[2:]} == {("step", 2), ("evaluation", "v")}
    assert "batch/pass_rate" not in next(r for r in again if r.key == ("step", 2)).figures
    shown = scalars(folder / BOARDS / "line-1")
    assert [step for step, _ in shown["train/loss"]] == [1, 2]
    assert shown["evaluation/pass_rate"] == [(1, 0.5)]
    assert shown["publication/pause_s"] == [(1, 0.3)]
    kept = read_served(tmp_path, run)
    assert kept is not None
    assert (kept.job, kept.serving) == ("t", (kind,))
    assert kept.sampling is not None
    assert kept.sampling.temperature == 0.5


async def test_what_redis_kept_from_being_written_is_written_later(
    redis: Redis, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it, folder = Run(redis, run), tmp_path / "tracking" / run
    await it.version(made(1, 1, 0))
    asked: list[str] = []

    async def away_once(client: Redis, name: str) -> tuple[ServingFingerprint, ...]:
        asked.append(name)
        if len(asked) == 1:
            raise Unavailable("Redis is away")
        return ()

    monkeypatch.setattr(served, "recorded", away_once)
    assert [row.key for row in await tracked_until(it, folder, 1)] == [("step", 1)]
    assert len(asked) == 2


@pytest.mark.parametrize("within", ["the batch's figures", "the file"])
async def test_a_stop_between_the_mark_and_the_file_loses_no_row_and_doubles_none(
    redis: Redis, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within: str
) -> None:
    it, folder = Run(redis, run), tmp_path / "tracking" / run
    await it.version(made(1, 1, 0), published(1, 1))
    tracker, reached = Tracker(redis, run, folder), threading.Event()
    let_go, write, with_batch = threading.Event(), Tracked.write, tracker._with_batch

    def slowly(files: Tracked, rows: Sequence[Row]) -> None:
        reached.set()
        let_go.wait(20)
        write(files, rows)

    async def never(row: Row) -> Row:
        reached.set()
        await asyncio.Event().wait()
        return row

    if within == "the file":
        monkeypatch.setattr(Tracked, "write", slowly)
    else:
        monkeypatch.setattr(tracker, "_with_batch", never)
    async with asyncio.TaskGroup() as tasks, asyncio.timeout(30):
        following = tasks.create_task(tracker.run(), name="tracking")
        await asyncio.to_thread(reached.wait, 20)
        await end(following)
        monkeypatch.setattr(tracker, "_with_batch", with_batch)
        last = tasks.create_task(tracker.last(20), name="last")
        let_go.set()
        await last
    assert [row.key for row in read_rows(folder / STEPS)] == [("step", 1), ("publication", 1)]


async def test_a_stop_does_not_wait_for_a_disk_that_hangs(
    redis: Redis, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it, folder = Run(redis, run), tmp_path / "tracking" / run
    await it.version(made(1, 1, 0), published(1, 1))
    tracker, let_go = Tracker(redis, run, folder), threading.Event()
    write = Tracked.write

    def hangs(files: Tracked, rows: Sequence[Row]) -> None:
        let_go.wait(60)

    monkeypatch.setattr(Tracked, "write", hangs)
    async with asyncio.timeout(30):
        await tracker.last(0.1)
    monkeypatch.setattr(Tracked, "write", write)
    let_go.set()
    assert [row.key for row in await tracked_until(it, folder, 2)] == [
        ("step", 1),
        ("publication", 1),
    ]


async def test_a_folder_that_cannot_be_written_is_told_and_stops_nothing(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    it = Run(redis, run)
    await it.version(made(1, 1, 0))
    (tmp_path / "tracking").write_text("a file is in the way")
    tracker = Tracker(redis, run, tmp_path / "tracking" / run)
    async with asyncio.timeout(20):
        await tracker.last(20)
    assert tracker._broken
