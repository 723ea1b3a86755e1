"""One episode as the run has recorded it: task, commands, what was seen of them, label.

Owns: finding an episode in the streams and in the history on disk. Promise: reading changes
nothing; an entry that stands in both counts once; a step whose output was deleted with its group's
payloads says so instead of pretending an empty one. Does not cover: running anything (replay.py).
"""

from __future__ import annotations

import asyncio
import difflib
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from redis.asyncio import Redis

from muster import codec
from muster.errors import InvalidInput, NotFound
from muster.record import runs, trimmed, unpackable
from muster.replay import RecordedStep
from muster.streams import Received, RunStreams, reaching_redis
from muster.types import OutcomeLabel, StepLimit, Value
from muster.v1 import events_pb2 as ev

OUTPUT_BYTES_MAX = 16 << 20  # of one step, unpacked


class SeenStep(Value, frozen=True):
    """A step that finished. `whole`: its output is still there."""

    step: RecordedStep
    whole: bool
    box_broken: bool = False


class RecordedEpisode(Value, frozen=True):
    """All that a replay needs. `unfinished`: a command that was about to run, else empty."""

    id: str
    run: str
    task: str
    digest: str
    archive: bytes
    host: str
    steps: tuple[SeenStep, ...]
    unfinished: str = ""
    label: OutcomeLabel | None = None


async def read_episode(
    client: Redis, run: str, episode: str, history: Path | None = None
) -> RecordedEpisode:
    """The episode GROUP.SIBLING.ATTEMPT of a run, whether it goes on or has ended.

    history: folder of the run's trimmed entries. Raises InvalidInput for what is no episode's
    name, NotFound when nothing of it is recorded, Unavailable, HostUnfit.
    """
    group, sibling, attempt = _place(episode)
    streams = RunStreams(client, run)
    opened: ev.GroupOpened | None = None
    finished: dict[int, ev.TurnFinished] = {}
    intended: dict[int, ev.TurnIntended] = {}
    groups: set[str] = set()
    for message in await _messages(streams, "events", history):
        event = _event(message)
        if event is None:
            continue
        groups.add(event.episode.group)
        if event.episode.group != group:
            continue
        if event.HasField("group_opened"):
            opened = event.group_opened
        elif (event.episode.sibling, event.episode.attempt) != (sibling, attempt):
            continue
        elif event.HasField("turn_finished"):
            finished[event.turn_finished.turn] = event.turn_finished
        elif event.HasField("turn_intended"):
            intended[event.turn_intended.turn] = event.turn_intended
    if opened is None:
        raise NotFound(
            f"run {run} has no group {group}",
            field="EPISODE",
            value=episode,
            way_out=_way_to(group, groups, run, await runs(client)),
        )
    label = await _label(streams, (group, sibling, attempt), history)
    if not finished and not intended and label is None:
        raise NotFound(
            f"group {group} is there, but no turn of this attempt is recorded",
            field="EPISODE",
            value=episode,
            way_out=f"siblings are 0 to {opened.group_size - 1}, attempts count from 0",
        )
    left = [turn for turn in sorted(intended) if turn not in finished]
    hosts = [turn.host for _, turn in sorted(finished.items()) if turn.host]
    return RecordedEpisode(
        id=episode,
        run=run,
        task=opened.task,
        digest=opened.task_digest,
        archive=await _archive(streams, client, opened),
        host=hosts[-1] if hosts else "",
        steps=await _steps(streams, finished, intended),
        unfinished=intended[left[-1]].command if left else "",
        label=label,
    )


def _way_to(group: str, groups: set[str], run: str, runs: list[str]) -> str:
    """Of a run that is there, the group that was meant; else the runs to choose from."""
    near = difflib.get_close_matches(group, sorted(groups), n=1, cutoff=0.0)
    if near:
        return f"did you mean {near[0]}? A group is named JOB-NUMBER"
    if run in runs:
        return "no group has been opened in it yet"
    return f"runs here: {', '.join(runs) or 'none'}; choose with --run"


def _place(episode: str) -> tuple[str, int, int]:
    group, _, rest = episode.partition(".")
    sibling, _, attempt = rest.partition(".")
    if not group or not sibling.isdecimal() or not attempt.isdecimal():
        raise InvalidInput(
            "not an episode",
            field="EPISODE",
            value=episode,
            way_out="write GROUP.SIBLING.ATTEMPT, as reports show it: job-7-00003.2.1",
        )
    return group, int(sibling), int(attempt)


async def _messages(streams: RunStreams, stream: str, history: Path | None) -> list[Received]:
    """The server's entries and those trimmed from it. What is trimmed meanwhile is on disk by
    then, so the disk is read last."""
    live = await streams.read_all(stream)
    kept = await asyncio.to_thread(trimmed, history, [stream]) if history else []
    return list({message.id: message for message in [*kept, *live]}.values())


def _event(message: Received) -> ev.TrajectoryEvent | None:
    try:
        return ev.TrajectoryEvent.FromString(message.data)
    except DecodeError:
        return None  # the audit tells of it


async def _label(
    streams: RunStreams, place: tuple[str, int, int], history: Path | None
) -> OutcomeLabel | None:
    """The first one recorded: it is the one that the bank keeps."""
    for message in await _messages(streams, "outcomes", history):
        try:
            label = ev.OutcomeLabel.FromString(message.data)
        except DecodeError:
            continue
        key = label.episode
        if (key.group, key.sibling, key.attempt) == place:
            return codec.label_from_pb(label)
    return None


async def _archive(streams: RunStreams, client: Redis, opened: ev.GroupOpened) -> bytes:
    found: Any
    with reaching_redis():
        found = await client.get(streams.key("task", opened.task_digest))
    if found is None:
        raise NotFound(
            "the task's files are no longer with the run",
            field="task",
            value=opened.task,
            way_out="without them no box can be made for its commands",
        )
    return bytes(found)


async def _steps(
    streams: RunStreams, finished: dict[int, ev.TurnFinished], intended: dict[int, ev.TurnIntended]
) -> tuple[SeenStep, ...]:
    turns = [turn for _, turn in sorted(finished.items()) if turn.command]
    named = [turn.output_key for turn in turns if turn.output_key]
    outputs = dict(zip(named, await streams.payloads(named), strict=True))
    steps: list[SeenStep] = []
    for turn in turns:
        packed = outputs.get(turn.output_key)
        before = intended.get(turn.turn)
        step = RecordedStep(
            turn=turn.turn,
            command=turn.command,
            exit_code=turn.exit_code,
            limit=_limit(turn.limit),
            output="" if packed is None else output(turn.output_key, packed),
            timeout_s=before.timeout_s if before else 0.0,
        )
        steps.append(SeenStep(step, packed is not None, turn.box_broken))
    return tuple(steps)


def _limit(name: str) -> StepLimit:
    try:
        return StepLimit(name or "none")
    except ValueError:
        raise InvalidInput(
            "not a limit that this version knows",
            field="limit",
            value=name,
            way_out="replay with the version that recorded it",
        ) from None


def output(key: str, packed: bytes) -> str:
    """What a command had said. Raises Refused, naming `key`, for what cannot be unpacked, or is
    more than OUTPUT_BYTES_MAX; HostUnfit where nothing can."""
    try:
        from muster import payload
    except ImportError as error:  # the base install
        raise unpackable(error, field="EPISODE", value=key) from error
    return payload.plain(key, packed, OUTPUT_BYTES_MAX).decode("utf-8", "replace")
