"""Messages of the run's streams as events of the machine, and its records as messages.

Owns: that mapping. Promise: a message that cannot be read raises InvalidInput and never half an
event. An entry's time is the one that Redis gave its id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from google.protobuf.message import DecodeError

from muster import codec, evaluated_codec
from muster.errors import InvalidInput
from muster.evaluated import EvaluatedGroup
from muster.stream_ids import id_unix_s
from muster.streams import Received, StreamEntry
from muster.types import job_and_index
from muster.v1 import events_pb2 as ev
from services.readybank import events as e

T = TypeVar("T")
_STAGES = {
    ev.BATCH_STAGE_FROZEN: "frozen",
    ev.BATCH_STAGE_RETURNED: "returned",
    ev.BATCH_STAGE_TRAINED: "trained",
}


def event_of(message: Received) -> e.BankEvent | None:
    """The event that a message of events, outcomes, versions or jobs stands for, if any."""
    return readable(message, _READERS[message.stream])


def readable(message: Received, read: Callable[[Received], T]) -> T:
    """What `read` makes of a message. Raises InvalidInput when it cannot."""
    try:
        return read(message)
    except (DecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(
            f"not a message of this stream: {error}",
            field=message.stream,
            value=message.id,
            way_out="see which program wrote it; the entry is left out and kept in stream `dead`",
        ) from error


def job_of(message: Received) -> str:
    """The job that an entry of events or jobs belongs to, "" when it names none.

    A group is named JOB-INDEX; see muster/types.py.
    """
    try:
        if message.stream == "jobs":
            return ev.JobRecord.FromString(message.data).job
        group = ev.TrajectoryEvent.FromString(message.data).episode.group
    except (DecodeError, UnicodeDecodeError):
        return ""
    found = job_and_index(group)
    return found[0] if found else ""


def _trajectory(message: Received) -> e.BankEvent | None:
    found = ev.TrajectoryEvent.FromString(message.data)
    at = id_unix_s(message.id)
    kind = found.WhichOneof("event")
    if kind == "group_opened":
        opened = found.group_opened
        return e.GroupOpened(
            group=found.episode.group,
            job=opened.job,
            task=opened.task,
            group_size=opened.group_size,
            sampling=codec.sampling_from_pb(opened.sampling),
            owner_epoch=found.episode.owner_epoch,
            at_unix_s=at,
            opened_at_version=opened.opened_at_version,
            policy=codec.policy_from_pb(opened.policy),
            id=message.id,
            purpose=codec.purpose_from_pb(opened.purpose),
        )
    key = codec.key_from_pb(found.episode)
    if kind == "turn_intended":
        intended = found.turn_intended
        return e.TurnIntended(key, intended.turn, intended.payload_key, at, message.id)
    if kind == "turn_finished":
        turn = found.turn_finished
        return e.TurnRecorded(
            episode=key,
            turn=turn.turn,
            payload_key=turn.payload_key,
            sampled_tokens=turn.sampled_tokens,
            spans=codec.spans_from_pb(turn.spans),
            at_unix_s=at,
            output_key=turn.output_key,
            id=message.id,
            prompt_tokens=turn.prompt_tokens,
            replica=turn.replica,
        )
    if kind == "episode_finished":
        return e.EpisodeRecorded(key, found.episode_finished.turns, at, message.id)
    return None


def _label(message: Received) -> e.BankEvent:
    found = ev.OutcomeLabel.FromString(message.data)
    key = codec.key_from_pb(found.episode)
    return e.LabelRecorded(key, codec.label_from_pb(found), id_unix_s(message.id), message.id)


def _version(message: Received) -> e.BankEvent:
    found = ev.PolicyVersionRecord.FromString(message.data)
    if found.stage == ev.VERSION_STAGE_UNSPECIFIED:
        raise InvalidInput("a version without a stage", field=message.stream, value=message.id)
    published = found.stage == ev.VERSION_STAGE_PUBLISHED
    moved = found.step_kl if found.HasField("step_kl") else None
    return e.VersionSeen(found.version, found.parent, published, moved)


def _job(message: Received) -> e.BankEvent | None:
    found = ev.JobRecord.FromString(message.data)
    return e.JobCancelled(found.job) if found.cancelled else None


_READERS = {"events": _trajectory, "outcomes": _label, "versions": _version, "jobs": _job}


def batch_record(message: Received) -> ev.BatchRecord:
    """A message of the batches stream. Raises InvalidInput for one that no bank writes."""
    found = ev.BatchRecord.FromString(message.data)
    if found.step < 1 or found.stage not in _STAGES:
        raise InvalidInput("not the record of a batch", field=message.stream, value=message.id)
    return found


def restored_batches(records: Iterable[ev.BatchRecord]) -> list[e.BatchRestored]:
    """One event per step: its newest revision, whole where that was frozen."""
    found: dict[int, e.Batch] = {}
    trained: set[int] = set()
    for record in records:
        if record.stage == ev.BATCH_STAGE_TRAINED:
            trained.add(record.step)
        known, batch = found.get(record.step), batch_from_pb(record)
        if known is None or (batch.revision, -batch.lacks) > (known.revision, -known.lacks):
            found[record.step] = batch
    return [e.BatchRestored(found[step], step in trained) for step in sorted(found)]


def restored_fate(message: Received) -> e.FateRestored:
    """A message of the fates stream."""
    found = ev.GroupFate.FromString(message.data)
    return e.FateRestored(found.group, codec.fate_from_pb(found.fate), found.reason)


def batch_from_pb(record: ev.BatchRecord) -> e.Batch:
    return e.Batch(
        step=record.step,
        members=tuple(e.BatchMember(m.group, tuple(m.attempts)) for m in record.members),
        asked_unix_s=record.asked_unix_s,
        complete_unix_s=record.complete_unix_s,
        trainer_epoch=record.trainer_epoch,
        policy_version=record.policy_version,
        revision=record.revision,
        returned=tuple(record.returned),
        groups=record.groups,
    )


def batch_to_pb(run: str, batch: e.Batch, stage: ev.BatchStage.ValueType) -> ev.BatchRecord:
    return ev.BatchRecord(
        run=run,
        step=batch.step,
        stage=stage,
        members=[ev.BatchMember(group=m.group, attempts=m.attempts) for m in batch.members],
        asked_unix_s=batch.asked_unix_s,
        complete_unix_s=batch.complete_unix_s,
        trainer_epoch=batch.trainer_epoch,
        policy_version=batch.policy_version,
        revision=batch.revision,
        returned=batch.returned,
        groups=batch.groups,
    )


def frozen_entry(run: str, batch: e.Batch) -> StreamEntry:
    """Written before anything of the batch is sent."""
    return _batch_entry(batch_to_pb(run, batch, ev.BATCH_STAGE_FROZEN), "frozen")


def returned_entries(
    run: str, batch: e.Batch, fates: tuple[e.FateRecord, ...]
) -> list[StreamEntry]:
    """What stays of a batch, and the fates of what was given back, to be written in one call."""
    record = batch_to_pb(run, batch, ev.BATCH_STAGE_RETURNED)
    return [_batch_entry(record, "returned"), *(fate_entry(run, fate) for fate in fates)]


def trained_entries(run: str, batch: e.Batch, fates: tuple[e.FateRecord, ...]) -> list[StreamEntry]:
    """The end of a step and of its groups, to be written in one call."""
    record = batch_to_pb(run, batch, ev.BATCH_STAGE_TRAINED)
    return [*(fate_entry(run, fate) for fate in fates), _batch_entry(record, "trained")]


def fate_entry(run: str, fate: e.FateRecord) -> StreamEntry:
    message = ev.GroupFate(
        run=run,
        group=fate.group,
        fate=codec.fate_to_pb(fate.fate),
        step=fate.step,
        reason=fate.reason,
        predicted_kl=fate.predicted_kl,
        scored_kl=fate.scored_kl,
        measured_kl=fate.measured_kl,
    )
    plain = (("group", fate.group), ("fate", fate.fate), ("step", str(fate.step)))
    return StreamEntry("fates", "fates", fate.group, message.SerializeToString(), plain)


def evaluated_entry(run: str, found: EvaluatedGroup) -> StreamEntry:
    """Written with the group's fate, in one call."""
    data = evaluated_codec.to_pb(run, found).SerializeToString()
    plain = (("job", found.job), ("group", found.group), ("task", found.task))
    return StreamEntry("evaluations", "evaluations", found.group, data, plain)


def closing_entries(run: str, command: e.WriteFate) -> list[StreamEntry]:
    """The fate of a group that is in no batch, and what was found out about it."""
    found = command.evaluated
    return [fate_entry(run, command.fate), *([evaluated_entry(run, found)] if found else [])]


def _batch_entry(record: ev.BatchRecord, stage: str) -> StreamEntry:
    plain = (("step", str(record.step)), ("stage", stage))
    data = record.SerializeToString()
    return StreamEntry("batches", "batches", batch_field(record), data, plain)


def batch_field(record: ev.BatchRecord) -> str:
    """What names a record of the batches stream: one of each step, stage and revision is written,
    and one of a step that is trained."""
    name = f"{record.step}/{_STAGES[record.stage]}"
    revised = record.revision and record.stage != ev.BATCH_STAGE_TRAINED
    return f"{name}/{record.revision}" if revised else name
