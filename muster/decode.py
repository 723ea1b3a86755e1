"""Stream entries into the carriers of a run's record.

Owns: what each entry says. Promise: pure; an entry that cannot be decoded is listed as damaged and
never dropped; of a record with gaps, no group is left in part. Does not cover: reading (record.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message
from msgspec.structs import replace

from muster import codec, evaluated_codec
from muster.entries import (
    Batch,
    Damaged,
    Dead,
    EvaluatedOf,
    FateOf,
    Finish,
    Intended,
    Job,
    Kept,
    Labelled,
    Member,
    Opened,
    Publication,
    PublicationTimes,
    Restored,
    RunRecord,
    Step,
    StreamState,
    Turn,
    Version,
)
from muster.errors import InvalidInput
from muster.streams import Received
from muster.types import job_and_index
from muster.v1 import events_pb2 as ev

R = TypeVar("R")


def decode(
    run: str,
    messages: Sequence[Received],
    states: Sequence[StreamState] = (),
    dead: Sequence[Dead] = (),
    kept: Kept | None = None,
    *,
    whole: bool = True,
) -> RunRecord:
    """A record from messages as they lie on the streams.

    whole: False when trimmed entries are missing; then retired groups are left out.
    """
    found: dict[str, list[Any]] = {name: [] for name in _TUPLES}
    for message in messages:
        try:
            field, value = _DECODERS[message.stream](message)
        except (DecodeError, InvalidInput) as error:
            field, value = "damaged", Damaged(message.stream, message.id, str(error))
        found[field].append(value)
    fields: dict[str, Any] = {name: tuple(values) for name, values in found.items()}
    fields |= {"streams": tuple(states), "dead": tuple(dead), "kept": kept or Kept()}
    record = RunRecord(run, whole=whole, **fields)
    return record if whole else _without_retired(record)


_TUPLES = (
    *("opened", "intended", "turns", "restored", "finished", "labels"),
    *("versions", "batches", "fates", "jobs", "evaluated", "damaged"),
)


def _without_retired(record: RunRecord) -> RunRecord:
    def here(group: str) -> bool:
        job, index = job_and_index(group) or (group, -1)
        return index not in record.kept.retired_after.get(job, ())

    batches = []
    for batch in record.batches:
        members = tuple(m for m in batch.members if here(m.group))
        if members:
            batches.append(replace(batch, members=members))
    kept: dict[str, Any] = {
        name: tuple(e for e in getattr(record, name) if here(e.key.group))
        for name in ("opened", "intended", "turns", "restored", "finished", "labels")
    }
    fates = tuple(f for f in record.fates if here(f.group))
    return replace(record, batches=tuple(batches), fates=fates, **kept)


def _event(m: Received) -> tuple[str, Any]:
    e = ev.TrajectoryEvent.FromString(m.data)
    key, kind = codec.key_from_pb(e.episode), e.WhichOneof("event")
    if kind is None or kind not in _EVENTS:
        raise InvalidInput("an event of no known kind", field="event", value=key.id)
    field, read = _EVENTS[kind]
    return field, read(m.id, key, e.seq, getattr(e, kind))


def _opened(at: str, key: Any, seq: int, g: ev.GroupOpened) -> Opened:
    what = (g.job, g.task, g.group_size, g.opened_at_version, g.opened_unix_s)
    wanted = codec.policy_from_pb(g.policy), codec.purpose_from_pb(g.purpose)
    return Opened(at, key, *what, *wanted)


def _turn_of(t: ev.TurnFinished | ev.TurnIntended) -> dict[str, Any]:
    """What an intended and a finished turn have in common."""
    names = (
        *("turn", "prompt_tokens", "sampled_tokens", "cached_tokens", "replica"),
        *("payload_key", "command", "host", "box"),
    )
    return {
        "spans": codec.spans_from_pb(t.spans),
        "intervals": codec.intervals_from_pb(t.intervals),
        **{name: getattr(t, name) for name in names},
    }


def _intended(at: str, key: Any, seq: int, t: ev.TurnIntended) -> Intended:
    return Intended(at, key, seq, timeout_s=t.timeout_s, **_turn_of(t))


def _turn(at: str, key: Any, seq: int, t: ev.TurnFinished) -> Turn:
    names = (
        *("exit_code", "limit", "wall_s", "cpu_s", "cpu_stall_s", "box_broken"),
        *("output_key", "resumed"),
    )
    return Turn(at, key, seq, **_turn_of(t), **{name: getattr(t, name) for name in names})


def _restored(at: str, key: Any, seq: int, b: ev.BoxRestored) -> Restored:
    boxes = (b.repair, b.lost_host, b.lost_box, b.host, b.box, b.turns_replayed, b.reason)
    return Restored(at, key, *boxes, b.start_unix_s, b.end_unix_s)


def _finish(at: str, key: Any, seq: int, f: ev.EpisodeFinished) -> Finish:
    intervals = codec.intervals_from_pb(f.intervals)
    times = (f.started_unix_s, f.finished_unix_s)
    return Finish(at, key, seq, f.turns, f.host, intervals, *times)


_EVENTS: Mapping[str, tuple[str, Callable[[str, Any, int, Any], Any]]] = {
    "group_opened": ("opened", _opened),
    "turn_intended": ("intended", _intended),
    "turn_finished": ("turns", _turn),
    "box_restored": ("restored", _restored),
    "episode_finished": ("finished", _finish),
}


def _label(m: Received) -> tuple[str, Any]:
    label = ev.OutcomeLabel.FromString(m.data)
    return "labels", Labelled(m.id, codec.key_from_pb(label.episode), codec.label_from_pb(label))


def _version(m: Received) -> tuple[str, Any]:
    v = ev.PolicyVersionRecord.FromString(m.data)
    if v.stage == ev.VERSION_STAGE_UNSPECIFIED:
        raise InvalidInput("no stage", field="stage", value=v.stage)
    step = _plain(Step, v.step) if v.HasField("step") else None
    publications = tuple(_plain(Publication, p) for p in v.publications)
    published = v.stage == ev.VERSION_STAGE_PUBLISHED
    moved = v.step_kl if v.HasField("step_kl") else None
    whence = (v.version, v.parent, v.digest, published, v.checkpoint, moved, v.at_unix_s)
    times = _plain(PublicationTimes, v.times)
    return "versions", Version(m.id, *whence, step, publications, times)


def _batch(m: Received) -> tuple[str, Any]:
    b = ev.BatchRecord.FromString(m.data)
    if b.stage == ev.BATCH_STAGE_UNSPECIFIED:
        raise InvalidInput("no stage", field="stage", value=b.stage)
    members = tuple(Member(x.group, tuple(x.attempts)) for x in b.members)
    times = (b.asked_unix_s, b.complete_unix_s)
    trained = b.stage == ev.BATCH_STAGE_TRAINED
    return "batches", Batch(
        m.id,
        b.step,
        trained,
        members,
        *times,
        b.trainer_epoch,
        b.policy_version,
        b.revision,
        tuple(b.returned),
        b.stage == ev.BATCH_STAGE_RETURNED,
    )


def _fate(m: Received) -> tuple[str, Any]:
    f = ev.GroupFate.FromString(m.data)
    kls = (_present(f, name) for name in ("predicted_kl", "scored_kl", "measured_kl"))
    return "fates", FateOf(m.id, f.group, codec.fate_from_pb(f.fate), f.step, f.reason, *kls)


def _job(m: Received) -> tuple[str, Any]:
    j = ev.JobRecord.FromString(m.data)
    sizes = (j.groups, j.group_size, j.submitted_unix_s, j.cancelled)
    wanted = codec.policy_from_pb(j.policy), codec.purpose_from_pb(j.purpose)
    return "jobs", Job(m.id, j.job, *sizes, *wanted)


def _evaluated(m: Received) -> tuple[str, Any]:
    found = evaluated_codec.from_pb(ev.EvaluatedGroup.FromString(m.data))
    return "evaluated", EvaluatedOf(m.id, found)


def _plain(kind: type[R], message: Message) -> R:
    """A carrier whose fields are those of the same names in the message."""
    names = kind.__struct_fields__  # type: ignore[attr-defined]
    return kind(**{name: _present(message, name) for name in names})


def _present(message: Message, name: str) -> Any:
    """A field's value; None where it may be absent, and is."""
    field = message.DESCRIPTOR.fields_by_name[name]
    return None if field.has_presence and not message.HasField(name) else getattr(message, name)


_DECODERS: Mapping[str, Callable[[Received], tuple[str, Any]]] = {
    "events": _event,
    "outcomes": _label,
    "versions": _version,
    "batches": _batch,
    "fates": _fate,
    "jobs": _job,
    "evaluations": _evaluated,
}
