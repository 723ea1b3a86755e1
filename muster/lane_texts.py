"""What is said of a sibling: what befell it, what its attempts did.

Owns: the words. Promise: pure; long texts and long lists are cut with a mark. Texts are as
recorded: whoever shows them cleans them. Does not cover: stretches of time (lanes.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from muster.entries import Turn
from muster.run_index import RunIndex
from muster.types import Value

_DETAILS_MAX = 60
_TEXT_MAX = 300


class Mark(Value, frozen=True):
    """Something that happened to a sibling: `kind` is repair or replay."""

    at_s: float  # here Unix seconds, on a timeline since its start
    kind: str
    text: str


def marks_of(index: RunIndex, group: str, sibling: int, newest: int) -> Iterator[Mark]:
    """Repairs and replays up to the newest attempt, at Unix times."""
    for attempt in range(newest + 1):
        episode = f"{group}.{sibling}.{attempt}"
        for event in index.restored.get(episode, ()):
            moved = f"box lost ({event.reason}), rebuilt on {event.host}"
            yield Mark(event.start_unix_s, "replay", f"{moved}: {event.turns_replayed} turns again")
        labelled = index.label(episode)
        for end in index.finished.get(episode, ())[:1]:
            if attempt < newest:
                cause = labelled.label.cause if labelled else "not recorded"
                text = f"attempt {attempt} ended ({cause}); attempt {attempt + 1} replaces it"
                yield Mark(end.finished_unix_s, "repair", text)


def details_of(index: RunIndex, group: str, sibling: int, newest: int) -> Iterator[str]:
    """What a person asks of a sibling; newest attempt first, long ones cut with a word."""
    lines = [
        line
        for attempt in range(newest, -1, -1)
        for line in attempt_lines(index, f"{group}.{sibling}.{attempt}")
    ]
    yield from lines[:_DETAILS_MAX]
    if len(lines) > _DETAILS_MAX:
        yield f"… {len(lines) - _DETAILS_MAX} more lines: muster explain {group}.{sibling}.{newest}"


def attempt_lines(index: RunIndex, episode: str) -> Iterator[str]:
    """What one attempt did, turn by turn, and how it ended."""
    labelled = index.label(episode)
    if labelled:
        label = labelled.label
        reward = "" if label.reward is None else f", reward {label.reward:g}"
        flaky = ", two different verdicts" if label.flaky else ""
        limit = f", limit {label.limit}" if label.limit else ""
        yield f"{episode}: {label.outcome} ({label.cause}{limit}){reward}{flaky}"
        if label.detail:
            yield f"  {label.detail[:_TEXT_MAX]}"
    else:
        yield f"{episode}: has not ended"
    done = {t.turn for t in index.turns.get(episode, ())}
    for turn in index.turns.get(episode, ()):
        yield _turn(turn)
    for intent in index.intended.get(episode, ()):
        if intent.turn not in done:
            command = intent.command[:_TEXT_MAX]
            yield f"  turn {intent.turn}: running, limit {intent.timeout_s:g} s: {command}"


def _turn(turn: Turn) -> str:
    tokens = f"{turn.prompt_tokens}+{turn.sampled_tokens} tokens on {turn.replica}"
    if not turn.command:
        return f"  turn {turn.turn}: {tokens}, no command"
    how = f"limit {turn.limit}" if turn.limit else f"exit {turn.exit_code}"
    kept = ", result kept by the box" if turn.resumed else ""
    step = f"{how} in {turn.wall_s:.2f} s{kept}: {turn.command[:_TEXT_MAX]}"
    return f"  turn {turn.turn}: {tokens}; {step}"
