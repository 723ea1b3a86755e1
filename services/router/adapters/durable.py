"""The router's side of the streams: what it writes, and what it reads back at start.

Owns: encoding of events, labels, jobs and payloads; the recovery read. Promise: one script call
per effect (an episode's end and its label stand or fall together), deduped by (attempt, seq).
Does not cover: what the records lead to (recovery.py, machine.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from redis.asyncio import Redis

from muster import codec, failpoints
from muster.clock import wall
from muster.errors import InvalidInput, NotFound
from muster.streams import RunStreams, StreamEntry, reaching_redis
from muster.taskset import Task, task_from_archive
from muster.types import EpisodeKey, Segment, StepLimit, job_and_index
from muster.v1 import events_pb2 as ev
from services.router import events as e
from services.router.adapters.evaluations import Evaluations
from services.router.adapters.payloads import Payloads
from services.router.adapters.restore import Conversations, Letters, Records, Restorer, TurnUsage
from services.router.adapters.totals import job_totals

TAILED = ("versions", "fates", "batches")


class Durable:
    """Reads and writes of one router incarnation."""

    def __init__(self, client: Redis, streams: RunStreams, *, tasks_cached: int = 256):
        self._redis, self._streams = client, streams
        self._tasks: dict[str, bytes] = {}
        self._tasks_cached = tasks_cached
        self.positions = dict.fromkeys(TAILED, "0")  # last id read, by tailed stream
        self._letters = Letters(streams)
        self.evaluations = Evaluations(client, streams)
        self.traces: dict[str, str] = {}  # of groups that were recovered
        self._payloads = Payloads()

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
            policy=codec.policy_to_pb(command.policy),
            purpose=codec.purpose_to_pb(command.purpose),
        )
        event = ev.TrajectoryEvent(episode=codec.key_to_pb(key), group_opened=opened)
        found = job_and_index(key.group)  # as the bank counts it once it is over
        retired = (("retired", found[0]), found[1]) if found else None
        entry = _entry("events", key, "opened", event, needs="", unless_bit=retired)
        await failpoints.at("router.open_group.before")
        await self._streams.append([entry])
        await failpoints.at("router.open_group.after")

    async def record_intent(
        self, command: e.RecordIntent, segments: Sequence[Segment], usage: TurnUsage
    ) -> None:
        """The reply with its tokens, before its command runs."""
        key = command.episode
        intent = ev.TurnIntended(
            turn=command.turn,
            payload_key=self._turn_key("p", key, command.turn),
            prompt_tokens=usage.prompt_tokens,
            sampled_tokens=usage.sampled_tokens,
            cached_tokens=usage.cached_tokens,
            spans=codec.spans_to_pb(usage.spans),
            replica=command.replica,
            command=command.command,
            timeout_s=command.timeout_s,
            host=command.host,
            box=command.box,
            intervals=codec.intervals_to_pb(command.intervals),
        )
        event = ev.TrajectoryEvent(
            episode=codec.key_to_pb(key), seq=command.turn, turn_intended=intent
        )
        entry = _entry("events", key, f"{key.id}#{command.turn}/intent", event)
        await failpoints.at("router.intend.before")
        payload = await self._payloads.turn(segments)
        await self._streams.append([entry], {intent.payload_key: payload})
        await failpoints.at("router.intend.after")

    async def record_turn(
        self, command: e.RecordTurn, segments: Sequence[Segment], usage: TurnUsage
    ) -> None:
        """A finished turn. With a command, its tokens are there since the intent."""
        key, payloads = command.episode, dict[str, bytes]()
        turn = ev.TurnFinished(
            turn=command.turn,
            payload_key=self._turn_key("p", key, command.turn),
            prompt_tokens=usage.prompt_tokens,
            sampled_tokens=usage.sampled_tokens,
            cached_tokens=usage.cached_tokens,
            spans=codec.spans_to_pb(usage.spans),
            replica=command.replica,
            command=command.command,
            exit_code=command.exit_code,
            intervals=codec.intervals_to_pb(command.intervals),
            limit="" if command.limit is StepLimit.NONE else str(command.limit),
            wall_s=command.wall_s,
            cpu_s=command.cpu_s,
            cpu_stall_s=command.cpu_stall_s,
            box_broken=command.box_broken,
            host=command.host,
            box=command.box,
            resumed=command.resumed,
        )
        if command.command:
            turn.output_key = self._turn_key("o", key, command.turn)
            payloads[turn.output_key] = self._payloads.text(command.output)
        else:
            payloads[turn.payload_key] = await self._payloads.turn(segments)
        event = ev.TrajectoryEvent(
            episode=codec.key_to_pb(key), seq=command.turn, turn_finished=turn
        )
        await failpoints.at("router.record_turn.before")
        await self._streams.append(
            [_entry("events", key, f"{key.id}#{command.turn}", event)], payloads
        )
        await failpoints.at("router.record_turn.after")

    async def record_restored(self, command: e.RecordRestored) -> None:
        key = command.episode
        restored = ev.BoxRestored(
            repair=command.repair,
            lost_host=command.lost_host,
            lost_box=command.lost_box,
            host=command.host,
            box=command.box,
            turns_replayed=command.turns_replayed,
            reason=command.reason,
            start_unix_s=command.start_unix_s,
            end_unix_s=command.end_unix_s,
        )
        event = ev.TrajectoryEvent(
            episode=codec.key_to_pb(key), seq=command.turns_replayed, box_restored=restored
        )
        entry = _entry("events", key, f"{key.id}#restored/{command.repair}", event)
        await failpoints.at("router.restore_box.before")
        await self._streams.append([entry])
        await failpoints.at("router.restore_box.after")

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
        await failpoints.at("router.record_episode.before")
        await self._streams.append(
            [
                _entry("events", key, f"{key.id}#end", event),
                _entry("outcomes", key, f"{key.id}#label", label),
            ]
        )
        await failpoints.at("router.record_episode.after")

    def _turn_key(self, kind: str, key: EpisodeKey, turn: int) -> str:
        return self._streams.key(kind, f"{key.id}.{turn}")

    async def submit(self, job: e.JobSpec, tasks: Sequence[Task]) -> bool:
        """Make a task set durable; False when the job id was there already."""
        record = ev.JobRecord(
            job=job.id,
            tasks=[ev.JobTask(name=t.name, digest=t.digest) for t in tasks],
            groups=job.groups,
            group_size=job.group_size,
            sampling=codec.sampling_to_pb(job.sampling),
            submitted_unix_s=job.submitted_unix_s,
            policy=codec.policy_to_pb(job.policy),
            purpose=codec.purpose_to_pb(job.purpose),
        )
        payloads = {self._streams.key("task", t.digest): t.archive for t in tasks}
        entry = StreamEntry("jobs", "jobs", job.id, record.SerializeToString())
        await failpoints.at("router.submit.before")
        new = (await self._streams.append([entry], payloads))[0]
        await failpoints.at("router.submit.after")
        return new

    async def cancel(self, job: str) -> None:
        record = ev.JobRecord(job=job, cancelled=True)
        entry = StreamEntry("jobs", "jobs", f"{job}/cancelled", record.SerializeToString())
        await failpoints.at("router.cancel.before")
        await self._streams.append([entry])
        await failpoints.at("router.cancel.after")

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

    async def recover(
        self, repairs_max: int, conversations: Conversations
    ) -> AsyncIterator[e.RouterEvent]:
        """Everything durable, as events: jobs, then fates, then groups."""
        letters, jobs, cancelled = self._letters, dict[str, e.JobSpec](), set[str]()
        for message in await self._streams.read_all("jobs"):
            record = letters.read(message, _job_record)
            if record is None:
                continue
            if record.cancelled:
                cancelled.add(record.job)
                yield e.JobCancelled(record.job)
            else:
                jobs[record.job] = await self._job(record)
                yield e.JobSubmitted(jobs[record.job])
        # The counts of retired groups last: one that the bank retires meanwhile is then whole in
        # the records and has its fate, or is counted. Else it would be opened again, or never end.
        records = await Records.read(self._streams)
        tailed = [event async for event in self._tailed()]
        retired = dict[str, frozenset[int]]()
        for job in jobs:
            totals = await self._totals(job)
            retired[job] = frozenset(totals.indexes_retired)
            yield totals
        over = set[str]()
        for event in tailed:
            if isinstance(event, e.FateRecorded):
                over.add(event.group)
            yield event
        restorer = Restorer(
            self._streams,
            letters,
            jobs,
            records,
            over=frozenset(over),
            cancelled=frozenset(cancelled),
            retired=retired,
            conversations=conversations,
        )
        bounds = {name: spec.policy.repairs(repairs_max) for name, spec in jobs.items()}
        for restored in await restorer.groups(bounds):
            yield restored
        self.traces = restorer.traces
        await letters.send()
        yield e.RecoveryEnded()

    async def _tailed(self) -> AsyncIterator[e.RouterEvent]:
        """Versions, fates and batches; what the bank has trimmed stands in its mark."""
        with reaching_redis():
            mark: Any = await self._redis.hget(self._streams.key("mark"), "step")
        if mark:
            yield e.BatchTrained(int(mark))
        for stream in TAILED:
            for message in await self._streams.read_all(stream):
                self.positions[stream] = message.id
                event = self._letters.read(message, partial(decode_tailed, message.stream))
                if event is not None:
                    yield event

    async def _totals(self, job: str) -> e.JobTotals:
        """What the bank counted of groups that are gone: counts and bits of one moment."""
        key = self._streams.key("retired", job)
        with reaching_redis():
            bits: Any = await self._redis.get(key)
            while True:
                found: Any = await self._redis.hgetall(self._streams.key("totals", job))
                before, bits = bits, await self._redis.get(key)
                if bits == before:  # else a group was retired in between
                    break
        return job_totals(job, {k.decode(): int(v) for k, v in found.items()}, bits or b"")

    async def follow(self) -> list[e.RouterEvent]:
        """What the bank and the trainer appended since; waits a second at most."""
        found: list[e.RouterEvent] = []
        messages = await self._streams.tail(self.positions)
        for message in messages:
            event = self._letters.read(message, partial(decode_tailed, message.stream))
            if event is not None:
                found.append(event)
        await self._letters.send()
        # Only now: whatever failed above is read again.
        self.positions |= {message.stream: message.id for message in messages}
        return found

    async def mark_read(self) -> None:
        """Say how far the tailed streams were read: the bank trims nothing beyond."""
        await self._streams.mark_read(self.positions)

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
            policy=codec.policy_from_pb(record.policy),
            purpose=codec.purpose_from_pb(record.purpose),
        )


def decode_tailed(stream: str, data: bytes) -> e.RouterEvent | None:
    """A message of the bank or the trainer as an event; None when it means nothing here."""
    if stream == "versions":
        version = ev.PolicyVersionRecord.FromString(data)
        if version.stage == ev.VERSION_STAGE_UNSPECIFIED:
            raise InvalidInput("a version without a stage", field=stream, value=version.version)
        published = version.stage == ev.VERSION_STAGE_PUBLISHED
        return e.VersionPublished(version.version, version.step.step) if published else None
    if stream == "batches":
        batch = ev.BatchRecord.FromString(data)
        return e.BatchTrained(batch.step) if batch.stage == ev.BATCH_STAGE_TRAINED else None
    fate = ev.GroupFate.FromString(data)
    return e.FateRecorded(fate.group, codec.fate_from_pb(fate.fate), fate.step)


def _job_record(data: bytes) -> ev.JobRecord:
    record = ev.JobRecord.FromString(data)
    if not record.job:
        raise InvalidInput("a job without a name", field="job", value="")
    return record


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
        builds=bool(task.unbuildable),
    )


def _entry(
    stream: str,
    key: EpisodeKey,
    dedupe: str,
    message: ev.TrajectoryEvent | ev.OutcomeLabel,
    *,
    needs: str = "opened",
    unless_bit: tuple[tuple[str, ...], int] | None = None,
) -> StreamEntry:
    """Of a group: nothing is written unless its opening was, which brings a guard of its own."""
    plain: tuple[tuple[str, str], ...] = (
        ("run", key.run),
        ("group", key.group),
        ("sibling", str(key.sibling)),
        ("attempt", str(key.attempt)),
        ("owner_epoch", str(key.owner_epoch)),
    )
    if isinstance(message, ev.TrajectoryEvent):
        plain += (("seq", str(message.seq)),)
    data = message.SerializeToString()
    return StreamEntry(stream, f"g:{key.group}", dedupe, data, plain, needs, unless_bit)
