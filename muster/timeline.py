"""A batch over time: its siblings as lanes, publications as bands.

Owns: which lanes, stretches, marks and bands a page shows. Promise: pure; times are seconds since
the timeline's start; a lane is whole or absent, and how many are absent is said; stretches too
short to be seen are joined to the one before. Texts are as recorded: whoever shows them cleans
them.
Does not cover: drawing (page.py and its script).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from muster.entries import Batch, Version
from muster.lane_texts import Mark, details_of, marks_of
from muster.lanes import lane
from muster.run_index import RunIndex
from muster.split import Lane, pieces
from muster.types import EpisodeState, StateInterval, Value

LANES_MAX = 512  # of one timeline, in whole groups
TIMELINES_MAX = 12  # newest batches
_UNSEEN = 4000  # a stretch shorter than this part of the whole is joined to another
_BEFORE = 0.25  # of the window: so near may a publication be to belong to it
_LIVE_S = 3600.0  # a run that moved since is drawn up to now
UNRECORDED = "unrecorded"  # since its last record: a turn's is written when the turn has ended


class Strip(Value, frozen=True):
    """One sibling. `stretches`: (state, from, to), in order and disjoint."""

    group: str
    task: str
    sibling: int
    ended: str  # outcome and cause, empty while it has none
    blocking: bool  # it ended after nine tenths of the others, or has not ended
    stretches: tuple[tuple[str, float, float], ...]
    marks: tuple[Mark, ...]
    details: tuple[str, ...]


class Band(Value, frozen=True):
    """A publication on its way."""

    text: str
    start_s: float
    end_s: float


class Timeline(Value, frozen=True):
    """`lines`: named moments (asked, complete); `lanes_total` counts those left out too."""

    title: str
    start_unix_s: float
    span_s: float
    lines: tuple[tuple[str, float], ...]
    bands: tuple[Band, ...]
    strips: tuple[Strip, ...]
    lanes_total: int


def timelines(index: RunIndex, now: float, only: int | None = None) -> list[Timeline]:
    """Newest first: groups that are open, then the batches; at most TIMELINES_MAX batches."""
    steps = sorted(index.steps, reverse=True)
    steps = [s for s in steps if only is None or s == only][:TIMELINES_MAX]
    found = [_of_batch(index, index.batch(step)) for step in steps]
    opened = _of_open(index, now) if only is None else None
    return [opened, *found] if opened else found


def _of_batch(index: RunIndex, batch: Batch) -> Timeline:
    places = [(m.group, n, a) for m in batch.members for n, a in enumerate(m.attempts)]
    lanes = {place: lane(index, *place) for place in places}
    began = [i.start_unix_s for one in lanes.values() for i in one.intervals]
    start = min([batch.asked_unix_s or batch.complete_unix_s, *began])
    end = max(batch.complete_unix_s, start)
    window = (_with_publication(index, start, end), start, end)
    moments = (("asked", batch.asked_unix_s), ("complete", batch.complete_unix_s))
    state = "trained" if batch.trained else "leased"
    return _timeline(index, f"batch {batch.step} ({state})", lanes, window, moments)


def _with_publication(index: RunIndex, start: float, end: float) -> float:
    """Also the publication that the batch began with, when it came just before."""
    for records in index.versions.values():
        for record in records:
            began = record.at_unix_s - _latency(record)
            if (
                record.published
                and began < min(start, record.at_unix_s)
                and start < record.at_unix_s + _BEFORE * (end - start)
            ):
                return max(began, start - (end - start))
    return start


def _of_open(index: RunIndex, now: float) -> Timeline | None:
    """Groups without a fate that stand in no batch."""
    held = index.in_batches()
    places = [
        (group, n, max(index.attempts.get((group, n), {0: []})))
        for group in index.opened
        if group not in index.fates and group not in held
        for n in range(index.size(group))
    ]
    if not places:
        return None
    known = {place: lane(index, *place) for place in places}
    times = [index.opened[group][0].opened_unix_s for group, _, _ in places]
    times += [
        t for one in known.values() for i in one.intervals for t in (i.start_unix_s, i.end_unix_s)
    ]
    start, end = min(times), max(times)
    end = now if end < now < end + _LIVE_S else end
    lanes = {place: _running(index, place, one, end) for place, one in known.items()}
    return _timeline(index, "open groups", lanes, (start, start, end), ())


def _running(index: RunIndex, place: tuple[str, int, int], one: Lane, end: float) -> Lane:
    """A step that was intended and has no result is still running."""
    episode = "{}.{}.{}".format(*place)
    turns = {t.turn for t in index.turns.get(episode, ())}
    for intent in index.intended.get(episode, ())[-1:]:
        began = max((i.end_unix_s for i in intent.intervals), default=end)
        if intent.turn not in turns and episode not in index.finished:
            step = StateInterval(EpisodeState.TOOL, began, end)
            return Lane((*one.intervals, step), one.done_unix_s)
    return one


Window = tuple[float, float, float]  # of the picture, of the lanes, end of both
Places = dict[tuple[str, int, int], Lane]


def _timeline(
    index: RunIndex,
    title: str,
    lanes: Places,
    window: Window,
    moments: Sequence[tuple[str, float]],
) -> Timeline:
    start, _, end = window
    blocking = _blocking(lanes)
    strips = [
        _strip(index, place, lanes[place], window, place in blocking) for place in _shown(lanes)
    ]
    lines = tuple((name, at - start) for name, at in moments if start <= at <= end)
    bands = tuple(_bands(index, start, end))
    return Timeline(title, start, end - start, lines, bands, tuple(strips), len(lanes))


def _blocking(lanes: Places) -> set[tuple[str, int, int]]:
    """Those that ended after nine tenths of all; the last one always."""
    if not lanes:
        return set()
    done = sorted(one.done_unix_s for one in lanes.values())
    bound = done[math.ceil(0.9 * len(done)) - 1]
    late = {p for p, one in lanes.items() if one.done_unix_s > bound or math.isinf(one.done_unix_s)}
    return late or {max(lanes, key=lambda p: lanes[p].done_unix_s)}


def _shown(lanes: Places) -> list[tuple[str, int, int]]:
    """Whole groups, those that ended last first, as many as there is room for."""
    groups: dict[str, list[tuple[str, int, int]]] = {}
    for place in lanes:
        groups.setdefault(place[0], []).append(place)
    ordered = sorted(groups.values(), key=lambda g: -max(lanes[p].done_unix_s for p in g))
    shown: list[tuple[str, int, int]] = []
    for group in ordered:
        if shown and len(shown) + len(group) > LANES_MAX:
            break
        shown += group[:LANES_MAX]
    return shown


def _strip(
    index: RunIndex,
    place: tuple[str, int, int],
    one: Lane,
    window: Window,
    blocking: bool,
) -> Strip:
    group, sibling, attempt = place
    labelled = index.label(f"{group}.{sibling}.{attempt}")
    label = labelled.label if labelled else None
    events = index.attempts.get((group, sibling), {})
    stretches = list(_joined(pieces(one, *window[1:]), window))
    if math.isinf(one.done_unix_s) and stretches and stretches[-1][0] == EpisodeState.QUEUE:
        stretches[-1] = (UNRECORDED, *stretches[-1][1:]) if events else stretches[-1]
    marks = marks_of(index, group, sibling, attempt)
    return Strip(
        group,
        index.opened[group][0].task if group in index.opened else "",
        sibling,
        f"{label.outcome}/{label.cause}" if label else "",
        blocking,
        tuple(stretches),
        tuple(Mark(m.at_s - window[0], m.kind, m.text) for m in marks),
        tuple(details_of(index, group, sibling, attempt)),
    )


def _joined(
    found: Iterable[tuple[float, float, str]], window: Window
) -> Iterator[tuple[str, float, float]]:
    start, _, end = window
    least = (end - start) / _UNSEEN
    last: tuple[str, float, float] | None = None
    for a, b, state in found:
        a, b = round(a - start, 4), round(b - start, 4)
        if last is not None and (state == last[0] or b - a < least):
            last = last[0], last[1], b
            continue
        if last is not None:
            yield last
        last = state, a, b
    if last is not None:
        yield last


def _bands(index: RunIndex, start: float, end: float) -> Iterator[Band]:
    for version, records in index.versions.items():
        for record in records:
            latency = _latency(record)
            a, b = max(record.at_unix_s - latency, start), min(record.at_unix_s, end)
            if record.published and latency and a < b:
                pause = max(p.pause_s for p in record.publications)
                text = f"version {version} published: {latency:.2f} s, longest pause {pause:.2f} s"
                if beside := record.times.trained_meanwhile_s:
                    text += f", {beside:.2f} s of training beside it"
                yield Band(text, a - start, b - start)


def _latency(record: Version) -> float:
    """Of the slowest replica that was reached."""
    return max((p.latency_s for p in record.publications if not p.error), default=0.0)
