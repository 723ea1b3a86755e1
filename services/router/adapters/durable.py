"""The router's side of the streams: what it writes, and what it reads back at start.

Owns: encoding of events, labels, jobs and payloads; the recovery read. Promise: one script call
per effect (an episode's end and its label stand or fall together), deduped by (attempt, seq).
Does not cover: what the records lead to (recovery.py, machine.py).
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import zstandard
from redis.asyncio import Redis

from muster import codec
from muster.clock import wall
from muster.errors import NotFound
from muster.streams import Received, RunStreams, StreamEntry, reaching_redis
from muster.taskset import Task, task_from_archive
from muster.types import EpisodeKey, OutcomeLabel, Segment, SegmentKind
from muster.v1 import events_pb2 as ev
from services.router import events as e
from services.router.recovery import AttemptSeen, restore_siblings

TAILED = ("versions", "fates", "batches")


class Durable:
    """Reads and writes of one router incarnation."""

    def __init__(self, client: Redis, streams: RunStreams, *, tasks_cached: int = 256):
        self._redis, self._streams = client, streams
        self._tasks: dict[str, bytes] = {}
        self._tasks_cached = tasks_cached
        self.positions = dict.fromkeys(TAILED, "0")  # last id read, by tailed stream
        self._packer = zstandard.ZstdCompressor(level=1)

    # -- writes ------------------------------------------------------------------------

    async def open_group(self, command: e.OpenGroup, key: EpisodeKey) -> None:
        opened = ev.GroupOpened(
            job=command.job,
            task=command.task,
            task_digest=command.task_digest,
            group_size=command.group_size,
            opened_at_version=command.version,
            opened_unix_s=wall(),
            sampling=codec.sampling_to_pb(command.sampling),
        )
        event = ev.TrajectoryEvent(episode=codec.key_to_pb(key), group_opened=opened)
        await self._streams.append([_entry("events", key, "opened", event)])

    async def record_turn(
        self, command: e.RecordTurn, segments: Sequence[Segment], usage: tuple[int, int]
    ) -> None:
        """`usage`: tokens of the context that was sent, and those found in the prefix cache."""
        key = command.episode
        payload_key = self._streams.key("p", f"{key.id}.{command.turn}")
        payload = ev.TurnPayload(segments=[codec.segment_to_pb(s) for s in segments])
        sampled = [s for s in segments if s.kind is SegmentKind.MODEL]
        turn = ev.TurnFinished(
            turn=command.turn,
            payload_key=payload_key,
            prompt_tokens=usage[0],
            sampled_tokens=_count(sampled),
            cached_tokens=usage[1],
            spans=[span for s in sampled for span in codec.spans_to_pb(s.spans)],
            replica=command.replica,
            command=command.command,
            exit_code=command.exit_code,
            intervals=codec.intervals_to_pb(command.intervals),
        )
        event = ev.TrajectoryEvent(
            episode=codec.key_to_pb(key), seq=command.turn, turn_finished=turn
        )
        packed = self._packer.compress(payload.SerializeToString())
        dedupe = f"{key.id}#{command.turn}"
        await self._streams.append([_entry("events", key, dedupe, event)], {payload_key: packed})

    async def record_episode(self, command: e.RecordEpisode) -> None:
        key = command.episode
        finished = ev.EpisodeFinished(
            turns=command.turns,
            host=command.host,
            intervals=codec.intervals_to_pb(command.intervals),
            started_unix_s=command.started_unix_s,
            finished_unix_s=command.finished_unix_s,
        )
        event = ev.TrajectoryEvent(
            episode=codec.key_to_pb(key), seq=command.turns, episode_finished=finished
        )
        label = codec.label_to_pb(key, command.label)
        await self._streams.append(
            [
                _entry("events", key, f"{key.id}#end", event),
                _entry("outcomes", key, f"{key.id}#label", label),
            ]
        )

    async def submit(self, job: e.JobSpec, tasks: Sequence[Task]) -> bool:
        """Make a task set durable; False when the job id was there already."""
        record = ev.JobRecord(
            job=job.id,
            tasks=[ev.JobTask(name=t.name, digest=t.digest) for t in tasks],
            groups=job.groups,
            group_size=job.group_size,
            sampling=codec.sampling_to_pb(job.sampling),
            submitted_unix_s=job.submitted_unix_s,
        )
        payloads = {self._streams.key("task", t.digest): t.archive for t in tasks}
        entry = StreamEntry("jobs", "jobs", job.id, record.SerializeToString())
        return (await self._streams.append([entry], payloads))[0]

    async def cancel(self, job: str) -> None:
        record = ev.JobRecord(job=job, cancelled=True)
        entry = StreamEntry("jobs", "jobs", f"{job}/cancelled", record.SerializeToString())
        await self._streams.append([entry])

    # -- reads -------------------------------------------------------------------------

    async def task_archive(self, digest: str) -> bytes:
        """The packed task; kept in a bounded cache."""
        if digest not in self._tasks:
            found: Any
            with reaching_redis():
                found = await self._redis.get(self._streams.key("task", digest))
            if found is None:
                raise NotFound("the task's files are not in Redis", field="digest", value=digest)
            while len(self._tasks) >= self._tasks_cached:
                self._tasks.pop(next(iter(self._tasks)))
            self._tasks[digest] = bytes(found)
        return self._tasks[digest]

    async def recover(self, repairs_max: int) -> AsyncIterator[e.RouterEvent]:
        """Everything durable, as events: jobs, then fates, then groups."""
        for message in await self._streams.read_all("jobs"):
            record = ev.JobRecord.FromString(message.data)
            if record.cancelled:
                yield e.JobCancelled(record.job)
            else:
                yield e.JobSubmitted(await self._job(record))
        for stream in TAILED:
            for message in await self._streams.read_all(stream):
                self.positions[stream] = message.id
                event = decode_tailed(message)
                if event is not None:
                    yield event
        for restored in await self._groups(repairs_max):
            yield restored
        yield e.RecoveryEnded()

    async def follow(self) -> list[e.RouterEvent]:
        """What the bank and the trainer appended since; waits a second at most."""
        found: list[e.RouterEvent] = []
        for message in await self._streams.tail(self.positions):
            self.positions[message.stream] = message.id
            event = decode_tailed(message)
            if event is not None:
                found.append(event)
        return found

    async def _job(self, record: ev.JobRecord) -> e.JobSpec:
        infos = []
        for task in record.tasks:
            archive = await self.task_archive(task.digest)
            infos.append(task_info(task_from_archive(archive, name=task.name)))
        return e.JobSpec(
            id=record.job,
            tasks=tuple(infos),
            groups=record.groups,
            group_size=record.group_size,
            sampling=codec.sampling_from_pb(record.sampling),
            submitted_unix_s=record.submitted_unix_s,
        )

    async def _groups(self, repairs_max: int) -> list[e.GroupRestored]:
        opened: dict[str, ev.GroupOpened] = {}
        seen: dict[str, dict[tuple[int, int], AttemptSeen]] = {}
        for message in await self._streams.read_all("events"):
            event = ev.TrajectoryEvent.FromString(message.data)
            group = event.episode.group
            if event.HasField("group_opened"):
                opened[group] = event.group_opened
                continue
            place = (event.episode.sibling, event.episode.attempt)
            attempts = seen.setdefault(group, {})
            known = attempts.get(place, AttemptSeen(*place))
            if event.HasField("turn_finished"):
                attempts[place] = msgspec.structs.replace(known, turns=known.turns + 1)
            else:
                attempts[place] = msgspec.structs.replace(known, finished=True)
        labels: dict[str, dict[tuple[int, int], OutcomeLabel]] = {}
        for message in await self._streams.read_all("outcomes"):
            label = ev.OutcomeLabel.FromString(message.data)
            place = (label.episode.sibling, label.episode.attempt)
            labels.setdefault(label.episode.group, {})[place] = codec.label_from_pb(label)
        return [
            e.GroupRestored(
                group=group,
                job=told.job,
                index=int(re.sub(r".*-", "", group)),
                siblings=restore_siblings(
                    told.group_size,
                    seen.get(group, {}).values(),
                    labels.get(group, {}),
                    repairs_max,
                ),
            )
            for group, told in opened.items()
        ]


def decode_tailed(message: Received) -> e.RouterEvent | None:
    """A message of the bank or the trainer as an event; None when it means nothing here."""
    if message.stream == "versions":
        version = ev.PolicyVersionRecord.FromString(message.data)
        published = version.stage == ev.VERSION_STAGE_PUBLISHED
        return e.VersionPublished(version.version, version.step.step) if published else None
    if message.stream == "batches":
        batch = ev.BatchRecord.FromString(message.data)
        return e.BatchTrained(batch.step) if batch.stage == ev.BATCH_STAGE_TRAINED else None
    fate = ev.GroupFate.FromString(message.data)
    return e.FateRecorded(fate.group, codec.fate_from_pb(fate.fate), fate.step)


def task_info(task: Task) -> e.TaskInfo:
    """What the machine needs to know of a task."""
    return e.TaskInfo(
        name=task.name,
        digest=task.digest,
        instruction=task.instruction,
        threshold=task.success_threshold,
        max_turns=task.max_turns or 0,
        episode_timeout_s=task.agent_timeout_s or 0.0,
        verify_timeout_s=task.verifier_timeout_s,
    )


def _count(segments: Sequence[Segment]) -> int:
    return sum(len(s.token_ids) for s in segments)


def _entry(
    stream: str, key: EpisodeKey, dedupe: str, message: ev.TrajectoryEvent | ev.OutcomeLabel
) -> StreamEntry:
    plain: tuple[tuple[str, str], ...] = (
        ("run", key.run),
        ("group", key.group),
        ("sibling", str(key.sibling)),
        ("attempt", str(key.attempt)),
        ("owner_epoch", str(key.owner_epoch)),
    )
    if isinstance(message, ev.TrajectoryEvent):
        plain += (("seq", str(message.seq)),)
    return StreamEntry(stream, f"g:{key.group}", dedupe, message.SerializeToString(), plain)
