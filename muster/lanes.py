"""A sibling over time: the intervals of all its attempts.

Owns: which recorded intervals make up a sibling's lane. Promise: pure; each stretch of a turn is
taken once (an intended turn that was finished speaks through its end); a box that was rebuilt is
the start of a box. Does not cover: what is done with them (split.py, timeline.py).
"""

from __future__ import annotations

import math

from muster.entries import Intended, Restored
from muster.run_index import Event, RunIndex
from muster.split import Lane
from muster.types import EpisodeState, StateInterval


def lane(index: RunIndex, group: str, sibling: int, attempt: int) -> Lane:
    """Of a sibling up to the attempt that counts; done when that one has ended."""
    intervals: list[StateInterval] = []
    for number, events in sorted(index.attempts.get((group, sibling), {}).items()):
        if number <= attempt:
            turns = {t.turn for t in index.turns.get(f"{group}.{sibling}.{number}", ())}
            intervals += [i for event in events for i in stretches(event, turns)]
    ends = index.finished.get(f"{group}.{sibling}.{attempt}", ())
    return Lane(tuple(intervals), ends[0].finished_unix_s if ends else math.inf)


def stretches(event: Event, turns_finished: set[int]) -> tuple[StateInterval, ...]:
    """The intervals that an event alone tells of."""
    if isinstance(event, Restored):
        return (StateInterval(EpisodeState.BOX_START, event.start_unix_s, event.end_unix_s),)
    if isinstance(event, Intended) and event.turn in turns_finished:
        return ()
    return event.intervals
