"""Episodes of a batch that a person may want to see: the slowest, the failed.

Owns: which ones, how many. Promise: pure; an attempt that was repaired is not among them, the one
that counts is; names are those that `muster replay` and `muster explain` take.
Does not cover: what they did (lane_texts.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from muster.entries import Member
from muster.figures import EpisodeOf
from muster.lanes import lane
from muster.run_index import RunIndex
from muster.split import Lane
from muster.types import Outcome

NAMED_MAX = 3


def slowest(index: RunIndex, members: Iterable[Member]) -> tuple[EpisodeOf, ...]:
    """Those that ended last, the last one first: the batch waited for them."""
    ended = [(done, one) for done, _, one in _ended(index, members)]
    ended.sort(key=lambda pair: (-pair[0], pair[1].id))
    return tuple(one for _, one in ended[:NAMED_MAX])


def failed(index: RunIndex, members: Iterable[Member]) -> tuple[EpisodeOf, ...]:
    """Those without success: invalid ones first, then in the batch's order."""
    found = [
        (outcome.valid, one)
        for _, outcome, one in _ended(index, members)
        if outcome is not Outcome.MODEL_SUCCESS
    ]
    found.sort(key=lambda pair: pair[0])
    return tuple(one for _, one in found[:NAMED_MAX])


def _began(one: Lane) -> float:
    """Of all attempts of the sibling: what was repaired took its time too."""
    return min((i.start_unix_s for i in one.intervals), default=one.done_unix_s)


def _ended(index: RunIndex, members: Iterable[Member]) -> list[tuple[float, Outcome, EpisodeOf]]:
    found = []
    for member in members:
        for sibling, attempt in enumerate(member.attempts):
            id_ = f"{member.group}.{sibling}.{attempt}"
            one = lane(index, member.group, sibling, attempt)
            labelled = index.label(id_)
            if not labelled or math.isinf(one.done_unix_s):
                continue
            label, began = labelled.label, _began(one)
            took = max(0.0, one.done_unix_s - began)
            seen = EpisodeOf(id_, f"{label.outcome}/{label.cause}", took)
            found.append((one.done_unix_s, label.outcome, seen))
    return found
