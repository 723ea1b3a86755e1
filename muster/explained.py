"""What the services say and what the streams say, put together for a person.

Owns: whose word counts for what, the order (outermost first), the command to run next. Promise:
pure; a service that did not answer is named, and the streams speak in its place; every text is
cleaned before it is shown. Does not cover: asking (cli/ask.py), the answers (the services,
explain.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from muster.clean import clean
from muster.explain import clock, consequence, of_record
from muster.lane_texts import attempt_lines
from muster.run_index import RunIndex
from muster.subject import Kind, Subject
from muster.types import Outcome, Value, Waiting
from muster.view import seconds

STREAMS = "streams"
_FURTHER = "muster explain "
_FAILED = f"ended: {Outcome.INFRA_FAILURE}"
_HERE = ("muster explain batch", "muster explain")  # what was just asked
_OF_THE_RUN = ("muster explain", "muster report", "muster audit")  # commands with these options
_OF_THE_FOLDER = ("muster watch",)  # and those that ask the router alone
_OWNERS = {"readybank": "the ready bank", "client": "whoever submits jobs"}
_OWNERS |= {"router": "the router", "trainer": "the trainer"}
_STEPS_MAX = 6
_NAMES = {"router": "router", "readybank": "ready bank", "trainer": "trainer", STREAMS: "streams"}
_ASKED = {
    Kind.RUN: ("trainer", "readybank", "router"),
    Kind.BATCH: ("trainer", "readybank", "router"),
    Kind.JOB: ("router",),
    Kind.GROUP: ("readybank", "router"),
    Kind.EPISODE: ("router",),
}


class Answer(Value, frozen=True):
    """What one service said; `problem` when it did not answer."""

    service: str
    waiting: tuple[Waiting, ...] = ()
    problem: str = ""


class Explained(Value, frozen=True):
    """`headline`: who has to move, in a sentence; `answers` outermost first; `steps`: what an
    episode did, and what becomes of its step."""

    subject: Subject
    at_unix_s: float
    headline: str
    answers: tuple[Answer, ...]
    steps: tuple[str, ...]
    next_command: str


def explained(
    index: RunIndex,
    asked: Subject,
    answers: Mapping[str, Answer],
    now: float,
    *,
    options: str = "",
    folder: str = "",
    logs: str = "logs",
) -> Explained:
    """options: what the next command needs to find the same run (" --state-dir X"); folder: those
    of them that tell where the run's state lies; logs: the folder that services mean by "logs"."""
    told = _chosen(index, asked, answers)
    line, command = _next(asked, [line for answer in told for line in answer.waiting])
    if command.startswith(_OF_THE_RUN):
        command += options
    elif command.startswith(_OF_THE_FOLDER):
        command += folder
    command = command.replace(" logs/", f" {logs}/")
    headline = _headline(asked, line, now) if line else ""
    return Explained(asked, now, headline, tuple(told), tuple(_steps(index, asked)), command)


def _chosen(index: RunIndex, asked: Subject, answers: Mapping[str, Answer]) -> list[Answer]:
    streams = Answer(STREAMS, tuple(of_record(asked, index)))
    if asked.kind is Kind.BATCH and int(asked.id) in index.steps:
        return [streams]  # the services explain the batch that is being collected
    told = [answers[kind] for kind in _ASKED[asked.kind]]
    inner = [answer for answer in told if answer.service != "trainer"]
    if any(answer.problem for answer in inner) or not any(answer.waiting for answer in inner):
        told.append(streams)
    return [answer for answer in told if answer.waiting or answer.problem]


def _next(asked: Subject, waiting: Sequence[Waiting]) -> tuple[Waiting | None, str]:
    """Further in: the first thing that stands and is not what was asked about; how to see it."""
    stands = [
        line
        for line in waiting
        if line.waits_for and line.next_command and line.subject != asked.id
    ]
    if asked.kind is not Kind.EPISODE:
        episodes = [line for line in stands if line.subject.count(".") >= 2]
        # What has failed comes first: whatever waits may well meet the same.
        episodes = [line for line in episodes if line.state.startswith(_FAILED)] or episodes
        if episodes:  # leads further than its group
            return episodes[0], f"muster explain {episodes[0].subject}"
        for line in stands:
            further = line.next_command.startswith(_FURTHER) and line.next_command not in _HERE
            if further or line.subject == line.owner == "trainer":
                same = [one for one in stands if one.next_command == line.next_command]
                return same[-1], line.next_command  # the innermost that leads there
    last = [line for line in waiting if line.next_command] or list(waiting)
    if not last:
        return None, "muster report"
    return last[-1], last[-1].next_command or "muster report"


def _headline(asked: Subject, line: Waiting, now: float) -> str:
    """Of all that is said below, what counts."""
    told = line.state if line.subject == asked.id else f"{line.subject}: {line.state}"
    if line.since_unix_s and line.waits_for:
        told += f", for {seconds(max(0.0, now - line.since_unix_s))}"
    if line.waits_for:
        told += f"; it waits for {line.waits_for}"
    if line.owner:
        told += f"; has to move: {_OWNERS.get(line.owner, line.owner)}"
    return told


def _steps(index: RunIndex, asked: Subject) -> list[str]:
    if asked.kind is not Kind.EPISODE:
        return []
    told = [line.strip() for line in attempt_lines(index, asked.id)]
    after = consequence(asked.id, index)
    return [*told[:1], *told[1:][-_STEPS_MAX:], *([after] if after else [])]


def lines(found: Explained) -> list[str]:
    """For a terminal; cleaned."""
    asked = found.subject
    title = f"batch {asked.id}" if asked.kind is Kind.BATCH else f"{asked.kind} {asked.id}"
    told = [f"{title} at {clock(found.at_unix_s)}"]
    told += [f"in short: {found.headline}"] if found.headline else []
    for answer in found.answers:
        name = _NAMES[answer.service]
        if answer.problem:
            told += ["", f"the {name} does not answer: {answer.problem}"]
            continue
        told += ["", f"the {name} {'say' if answer.service == STREAMS else 'says'}:"]
        told += [line for one in answer.waiting for line in _waiting(one, found.at_unix_s)]
    if found.steps:
        told += ["", "so far, by the streams:", *(f"  {step}" for step in found.steps)]
    told += ["", f"next: {found.next_command}"]
    return [clean(" ".join(line.split("\n")), longest=600) for line in told]


def _waiting(line: Waiting, now: float) -> Iterator[str]:
    yield f"  {line.subject}: {line.state}"
    told = [f"waits for {line.waits_for}"] if line.waits_for else []
    if line.since_unix_s:
        age = seconds(max(0.0, now - line.since_unix_s))
        told.append(f"since {clock(line.since_unix_s)} ({age})")
    if line.owner and line.waits_for:
        told.append(f"has to move: {_OWNERS.get(line.owner, line.owner)}")
    if told:
        yield f"      {'; '.join(told)}"
