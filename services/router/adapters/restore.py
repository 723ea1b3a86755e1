"""What a starting router reads back of groups: records, then the payloads of what goes on.

Owns: decoding of the events and outcomes streams, the conversations of resumed attempts. Promise:
an entry that cannot be read is put aside in the stream `dead`, with the reason, and never stops a
router; a payload that is lost ends its attempt, named, not the router. Payloads are read a page at
a time. Does not cover: what follows from the records (recovery.py), jobs and versions (durable.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec
from google.protobuf.message import DecodeError

from muster import codec, payload, segment_codec, telemetry
from muster.errors import InvalidInput, Refused
from muster.streams import Received, RunStreams, StreamEntry, dead_entry
from muster.types import (
    FinishReason,
    OutcomeLabel,
    Segment,
    SegmentKind,
    StepLimit,
    Value,
    VersionSpan,
    job_and_index,
)
from muster.v1 import events_pb2 as ev
from services.router import chat
from services.router import events as e
from services.router.recovery import AttemptSeen, restore_siblings

T = TypeVar("T")
Place = tuple[int, int]  # sibling, attempt
_log = telemetry.logger("router.restore")
_PAGE = 64  # payloads asked for at once


class TurnUsage(Value, frozen=True):
    """Figures of one reply, for its records. `prompt_tokens`: the whole context that was sent."""

    prompt_tokens: int = 0
    sampled_tokens: int = 0
    cached_tokens: int = 0  # of the context, those found in the prefix cache
    spans: tuple[VersionSpan, ...] = ()


class Conversations(Protocol):
    """Who keeps the tokens of episodes."""

    def text(self, ids: Sequence[int]) -> str:
        """Text of sampled ids."""
        ...

    async def prompt(self, opening: tuple[e.Message, ...]) -> tuple[int, tuple[int, ...]]:
        """How many tokens an opening has, and the chain hashes of its whole blocks."""
        ...

    def restore(
        self,
        episode: str,
        opening: tuple[e.Message, ...],
        turns: Sequence[Sequence[Segment]],
        answers: Sequence[e.Message],
        usage: TurnUsage,
    ) -> None:
        """Take an episode over; `answers`: what followed each turn but the last."""
        ...


class Letters:
    """Entries that cannot be read."""

    def __init__(self, streams: RunStreams):
        self._streams = streams
        self.dead: list[StreamEntry] = []

    def read(self, message: Received, parse: Callable[[bytes], T]) -> T | None:
        """What an entry says; None, and a dead letter to be sent, when nobody can tell."""
        try:
            return parse(message.data)
        except (DecodeError, InvalidInput, ValueError) as error:
            letter = dead_entry(message, f"{type(error).__name__}: {error}")
            _log.error(
                "entry %s of stream %s cannot be read (%s): put aside in the stream `dead`; "
                "`muster audit` shows it",
                message.id,
                message.stream,
                dict(letter.plain)["reason"],
            )
            self.dead.append(letter)
            return None

    async def send(self) -> None:
        """Make them durable, each once."""
        while self.dead:
            await self._streams.append(self.dead[:_PAGE])
            del self.dead[:_PAGE]


class Records(Value, frozen=True):
    """The entries of groups, as they are in Redis."""

    events: list[Received]
    outcomes: list[Received]

    @classmethod
    async def read(cls, streams: RunStreams) -> Records:
        return cls(await streams.read_all("events"), await streams.read_all("outcomes"))


class Restorer:
    """Reads the groups of a run back."""

    def __init__(
        self,
        streams: RunStreams,
        letters: Letters,
        jobs: Mapping[str, e.JobSpec],
        records: Records,
        *,
        over: frozenset[str],
        cancelled: frozenset[str],
        retired: Mapping[str, frozenset[int]],
        conversations: Conversations,
    ):
        """`over`: groups with a fate; `cancelled`: jobs; `retired`: indexes by job."""
        self._streams, self._letters, self._jobs = streams, letters, jobs
        self._records = records
        self._over, self._cancelled, self._retired = over, cancelled, retired
        self._conversations = conversations
        self.traces: dict[str, str] = {}  # group → traceparent of its opening
        self._opened: dict[str, ev.GroupOpened] = {}
        self._seen: dict[str, dict[Place, AttemptSeen]] = {}
        self._labels: dict[str, dict[Place, OutcomeLabel]] = {}
        self._usage: dict[str, TurnUsage] = {}  # episode → of its newest intent

    async def groups(self, repairs_max: Mapping[str, int]) -> list[e.GroupRestored]:
        """Every group that is not retired, in the order of opening. `repairs_max` by job."""
        for message in self._records.events:
            opened = self._letters.read(message, self._take_event)
            if opened and message.traceparent:
                self.traces[opened] = message.traceparent
        for message in self._records.outcomes:
            self._letters.read(message, self._take_label)
        found = []
        for group, told in self._opened.items():
            if told.job not in self._jobs:
                continue  # its job's own entry could not be read
            siblings = restore_siblings(
                told.group_size,
                self._seen.get(group, {}).values(),
                self._labels.get(group, {}),
                repairs_max[told.job],
            )
            _, index = _job_and_index(group)
            prompt: tuple[int, tuple[int, ...]] = (0, ())
            if group not in self._over and told.job not in self._cancelled:
                opening = self._opening(told.job, index)
                siblings = await self._with_payloads(group, opening, siblings)
                prompt = await self._conversations.prompt(opening)
            found.append(e.GroupRestored(group, told.job, index, siblings, *prompt))
        return found

    def _opening(self, job: str, index: int) -> tuple[e.Message, ...]:
        """What all siblings of a group begin with."""
        tasks = self._jobs[job].tasks
        return chat.opening(tasks[index % len(tasks)].instruction)

    # -- records -----------------------------------------------------------------------

    def _take_event(self, data: bytes) -> str:
        """Answers the group that this entry opens."""
        event = ev.TrajectoryEvent.FromString(data)
        group = event.episode.group
        job, index = _job_and_index(group)
        if index in self._retired.get(job, ()):
            return ""
        if event.HasField("group_opened"):
            self._opened.setdefault(group, event.group_opened)
            return group
        place = (event.episode.sibling, event.episode.attempt)
        attempts = self._seen.setdefault(group, {})
        attempts[place] = self._after(attempts.get(place, AttemptSeen(*place)), event)
        return ""

    def _after(self, seen: AttemptSeen, event: ev.TrajectoryEvent) -> AttemptSeen:
        match event.WhichOneof("event"):
            case "turn_intended":
                told = event.turn_intended
                self._usage[codec.key_from_pb(event.episode).id] = TurnUsage(
                    told.prompt_tokens,
                    told.sampled_tokens,
                    told.cached_tokens,
                    codec.spans_from_pb(told.spans),
                )
                return seen.intended(_intent(told)).in_box(told.host, told.box)
            case "turn_finished":
                turn = event.turn_finished
                return seen.turned(_turn(turn)).in_box(turn.host, turn.box)
            case "box_restored":
                box = event.box_restored
                return seen.restored(box.repair).in_box(box.host, box.box)
            case "episode_finished":
                return seen.ended(event.episode_finished.turns)
            case _:
                return seen

    def _take_label(self, data: bytes) -> None:
        label = ev.OutcomeLabel.FromString(data)
        place = (label.episode.sibling, label.episode.attempt)
        self._labels.setdefault(label.episode.group, {})[place] = codec.label_from_pb(label)

    # -- payloads ----------------------------------------------------------------------

    async def _with_payloads(
        self,
        group: str,
        opening: tuple[e.Message, ...],
        siblings: Iterable[e.SiblingRestored],
    ) -> tuple[e.SiblingRestored, ...]:
        """The same, with what only payloads tell; the conversations are handed over."""
        found = []
        for number, told in enumerate(siblings):
            if told.resume is not None and not told.resume.broken:
                episode = f"{group}.{number}.{told.attempt}"
                record = await self._resumed(episode, told.resume, opening)
                told = msgspec.structs.replace(told, resume=record)
            found.append(told)
        return tuple(found)

    async def _resumed(
        self, episode: str, record: e.Resume, opening: tuple[e.Message, ...]
    ) -> e.Resume:
        numbers = [t.turn for t in record.turns] + ([record.intent.turn] if record.intent else [])
        try:
            turns = [
                _segments(data)
                for data in await self._payloads("p", episode, numbers, "the tokens of")
            ]
            acted = [t.turn for t in record.turns if t.command]
            outputs = dict(
                zip(
                    acted,
                    map(_output, await self._payloads("o", episode, acted, "the output of")),
                    strict=True,
                )
            )
        except (LookupError, ValueError, DecodeError, InvalidInput, Refused) as error:
            return msgspec.structs.replace(record, broken=str(error))
        seen = tuple(
            msgspec.structs.replace(
                turn, output=outputs.get(turn.turn, ""), done=self._done(turn, segments)
            )
            for turn, segments in zip(record.turns, turns, strict=False)
        )
        answers = [chat.answer(turn) for turn in seen][: len(turns) - 1]
        usage = self._usage.get(episode, TurnUsage())
        self._conversations.restore(episode, opening, turns, answers, usage)
        return msgspec.structs.replace(record, turns=seen)

    def _done(self, turn: e.TurnSeen, segments: Sequence[Segment]) -> bool:
        """Whether a reply without a command was the end. (Half a command is not recorded.)"""
        if turn.command:
            return False
        sampled = [id_ for s in segments if s.kind is SegmentKind.MODEL for id_ in s.token_ids]
        return chat.parse(self._conversations.text(sampled), FinishReason.LENGTH).done

    async def _payloads(
        self, kind: str, episode: str, turns: Sequence[int], what: str
    ) -> list[bytes]:
        """Raises LookupError, naming the turn, where there is none."""
        found: list[bytes] = []
        for page in _pages(turns):
            keys = [self._streams.key(kind, f"{episode}.{turn}") for turn in page]
            stored = await self._streams.payloads(keys)
            for turn, key, data in zip(page, keys, stored, strict=True):
                if data is None:
                    raise LookupError(f"{what} turn {turn} are not in Redis any more")
                found.append(payload.plain(key, data))
        return found


def _output(data: bytes) -> str:
    return data.decode("utf-8")


def _segments(data: bytes) -> tuple[Segment, ...]:
    turn = ev.TurnPayload.FromString(data)
    return tuple(segment_codec.segment_from_pb(segment) for segment in turn.segments)


def _pages(numbers: Sequence[int]) -> Iterator[Sequence[int]]:
    return (numbers[at : at + _PAGE] for at in range(0, len(numbers), _PAGE))


def _job_and_index(group: str) -> tuple[str, int]:
    """Raises InvalidInput when it is none of ours."""
    found = job_and_index(group)
    if found is None:
        raise InvalidInput("not the name of a group", field="group", value=group)
    return found


def _intent(told: ev.TurnIntended) -> e.IntentSeen:
    return e.IntentSeen(
        turn=told.turn,
        command=told.command,
        timeout_s=told.timeout_s,
        prompt_tokens=told.prompt_tokens,
        sampled_tokens=told.sampled_tokens,
        replica=told.replica,
        intervals=codec.intervals_from_pb(told.intervals),
    )


def _turn(told: ev.TurnFinished) -> e.TurnSeen:
    return e.TurnSeen(
        turn=told.turn,
        prompt_tokens=told.prompt_tokens,
        sampled_tokens=told.sampled_tokens,
        replica=told.replica,
        intervals=codec.intervals_from_pb(told.intervals),
        command=told.command,
        exit_code=told.exit_code,
        limit=StepLimit(told.limit or StepLimit.NONE),
        wall_s=told.wall_s,
        cpu_s=told.cpu_s,
        cpu_stall_s=told.cpu_stall_s,
        box_broken=told.box_broken,
    )
