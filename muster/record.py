"""Everything a run has written to its streams, read once into plain carriers.

Owns: decoding of the six streams. Promise: every entry that is there is in the record, in stream
order, with its stream id; one that cannot be decoded is listed as damaged and never dropped.
Report, audit and split work on a RunRecord alone, so they need no server and no services.
Does not cover: token payloads (they are deleted once trained).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message
from redis.asyncio import Redis

from muster import codec
from muster.errors import InvalidInput, NotFound
from muster.streams import STREAMS, Received, RunStreams, reaching_redis
from muster.types import EpisodeKey, Fate, OutcomeLabel, StateInterval, Value, VersionSpan
from muster.v1 import events_pb2 as ev

R = TypeVar("R")


class Opened(Value, frozen=True):
    """A group was opened. Times in Unix seconds, router clock."""

    at: str  # stream id
    key: EpisodeKey
    job: str
    task: str
    group_size: int
    version: int
    opened_unix_s: float


class Turn(Value, frozen=True):
    """A turn was finished."""

    at: str
    key: EpisodeKey
    seq: int
    turn: int
    prompt_tokens: int
    sampled_tokens: int
    cached_tokens: int
    spans: tuple[VersionSpan, ...]
    replica: str
    intervals: tuple[StateInterval, ...]


class Finish(Value, frozen=True):
    """An attempt ended."""

    at: str
    key: EpisodeKey
    seq: int
    turns: int
    host: str
    intervals: tuple[StateInterval, ...]
    started_unix_s: float
    finished_unix_s: float


class Labelled(Value, frozen=True):
    """What became of an attempt."""

    at: str
    key: EpisodeKey
    label: OutcomeLabel


class Step(Value, frozen=True):
    """The optimizer step that made a version."""

    step: int
    loss: float
    grad_norm: float
    tokens: int
    groups_with_variance: int
    mismatch_k1: float
    mismatch_k3: float
    mismatch_max_abs: float
    ess_fraction: float
    truncated_share: float
    train_s: float


class Publication(Value, frozen=True):
    """A version's way to one replica; seconds."""

    replica: str
    latency_s: float
    pause_s: float
    token_gap_s: float
    receive_s: float
    apply_s: float
    requests_recomputed: int
    tokens_lost: int
    error: str


class Version(Value, frozen=True):
    """A policy version reached a stage: durable, or published."""

    at: str
    version: int
    parent: int
    digest: str
    published: bool
    checkpoint: str
    step_kl: float
    at_unix_s: float
    step: Step | None
    publications: tuple[Publication, ...]


class Member(Value, frozen=True):
    """A group of a batch, with the attempt that counts for each sibling."""

    group: str
    attempts: tuple[int, ...]


class Batch(Value, frozen=True):
    """A batch was frozen, or trained."""

    at: str
    step: int
    trained: bool
    members: tuple[Member, ...]
    asked_unix_s: float
    complete_unix_s: float
    trainer_epoch: int
    policy_version: int


class FateOf(Value, frozen=True):
    """The end of a group."""

    at: str
    group: str
    fate: Fate
    step: int
    reason: str


class Job(Value, frozen=True):
    """A task set was submitted, or cancelled."""

    at: str
    job: str
    groups: int
    group_size: int
    submitted_unix_s: float
    cancelled: bool


class Damaged(Value, frozen=True):
    """An entry that says nothing a service could have meant."""

    stream: str
    at: str
    problem: str


class StreamState(Value, frozen=True):
    """What the server itself counts: entries ever added, still there, newest one deleted."""

    stream: str
    added: int
    length: int
    max_deleted: str = "0-0"  # set by XDEL, not by trimming


class RunRecord(Value, frozen=True):
    """All streams of one run. Each tuple is in stream order."""

    run: str
    opened: tuple[Opened, ...] = ()
    turns: tuple[Turn, ...] = ()
    finished: tuple[Finish, ...] = ()
    labels: tuple[Labelled, ...] = ()
    versions: tuple[Version, ...] = ()
    batches: tuple[Batch, ...] = ()
    fates: tuple[FateOf, ...] = ()
    jobs: tuple[Job, ...] = ()
    damaged: tuple[Damaged, ...] = ()
    streams: tuple[StreamState, ...] = ()


async def read_record(client: Redis, run: str) -> RunRecord:
    """Read all streams of `run`.

    Raises NotFound, naming the runs that are there, when nothing of it is; Unavailable.
    """
    streams = RunStreams(client, run)
    states = [state for name in STREAMS if (state := await _state(client, streams, name))]
    if not states:
        raise NotFound(
            "there is nothing of that run",
            field="run",
            value=run,
            way_out=f"runs here: {', '.join(await runs(client)) or 'none'}; choose with --run",
        )
    return decode(run, [m for name in STREAMS for m in await streams.read_all(name)], states)


async def runs(client: Redis) -> list[str]:
    """Names of the runs that have a stream here, at most a hundred of them."""
    found: set[str] = set()
    with reaching_redis():
        async for key in client.scan_iter(match="m:{*}:*", count=1000, _type="stream"):
            found.add(key.decode().partition("{")[2].partition("}")[0])
            if len(found) >= 100:
                break
    return sorted(found)


async def _state(client: Redis, streams: RunStreams, name: str) -> StreamState | None:
    key = streams.key(name)
    with reaching_redis():
        if not await client.exists(key):
            return None
        info: Mapping[str, Any] = await client.xinfo_stream(key)
    deleted = info.get("max-deleted-entry-id", b"0-0")
    return StreamState(
        name,
        int(info.get("entries-added", info["length"])),
        int(info["length"]),
        deleted.decode() if isinstance(deleted, bytes) else str(deleted),
    )


def decode(
    run: str, messages: list[Received], states: list[StreamState] | None = None
) -> RunRecord:
    """A record from messages as they lie on the streams."""
    found: dict[str, list[Any]] = {name: [] for name in RunRecord.__struct_fields__}
    for message in messages:
        try:
            field, value = _DECODERS[message.stream](message)
        except (DecodeError, InvalidInput) as error:
            field, value = "damaged", Damaged(message.stream, message.id, str(error))
        found[field].append(value)
    found["streams"] = states or []
    del found["run"]
    return RunRecord(run, **{name: tuple(values) for name, values in found.items()})


def _event(m: Received) -> tuple[str, Any]:
    e = ev.TrajectoryEvent.FromString(m.data)
    key, kind = codec.key_from_pb(e.episode), e.WhichOneof("event")
    if kind == "group_opened":
        g = e.group_opened
        return "opened", Opened(
            m.id, key, g.job, g.task, g.group_size, g.opened_at_version, g.opened_unix_s
        )
    if kind == "turn_finished":
        t = e.turn_finished
        spans, intervals = codec.spans_from_pb(t.spans), codec.intervals_from_pb(t.intervals)
        tokens = (t.prompt_tokens, t.sampled_tokens, t.cached_tokens)
        return "turns", Turn(m.id, key, e.seq, t.turn, *tokens, spans, t.replica, intervals)
    if kind == "episode_finished":
        f = e.episode_finished
        intervals = codec.intervals_from_pb(f.intervals)
        times = (f.started_unix_s, f.finished_unix_s)
        return "finished", Finish(m.id, key, e.seq, f.turns, f.host, intervals, *times)
    raise InvalidInput("an event of no known kind", field="event", value=key.id)


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
    whence = (v.version, v.parent, v.digest, published, v.checkpoint, v.step_kl, v.at_unix_s)
    return "versions", Version(m.id, *whence, step, publications)


def _batch(m: Received) -> tuple[str, Any]:
    b = ev.BatchRecord.FromString(m.data)
    if b.stage == ev.BATCH_STAGE_UNSPECIFIED:
        raise InvalidInput("no stage", field="stage", value=b.stage)
    members = tuple(Member(x.group, tuple(x.attempts)) for x in b.members)
    times = (b.asked_unix_s, b.complete_unix_s)
    trained = b.stage == ev.BATCH_STAGE_TRAINED
    return "batches", Batch(
        m.id, b.step, trained, members, *times, b.trainer_epoch, b.policy_version
    )


def _fate(m: Received) -> tuple[str, Any]:
    f = ev.GroupFate.FromString(m.data)
    return "fates", FateOf(m.id, f.group, codec.fate_from_pb(f.fate), f.step, f.reason)


def _job(m: Received) -> tuple[str, Any]:
    j = ev.JobRecord.FromString(m.data)
    return "jobs", Job(m.id, j.job, j.groups, j.group_size, j.submitted_unix_s, j.cancelled)


def _plain(kind: type[R], message: Message) -> R:
    """A carrier whose fields are those of the same names in the message."""
    names = kind.__struct_fields__  # type: ignore[attr-defined]
    return kind(**{name: getattr(message, name) for name in names})


_DECODERS: Mapping[str, Callable[[Received], tuple[str, Any]]] = {
    "events": _event,
    "outcomes": _label,
    "versions": _version,
    "batches": _batch,
    "fates": _fate,
    "jobs": _job,
}
