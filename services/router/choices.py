"""Why an episode is where it is, in words: its box, its seat, its newest request.

Owns: the words for the terms that AcquireBox and Generate carry. Promise: pure; says what was
chosen and by which figures, as it was when it was chosen. Does not cover: what it waits for now
(explain.py), the choices (hosts.py, seats.py, placements.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from muster.types import Waiting
from services.router.episode import Episode
from services.router.fleet import Fleet

_SHOWN = 4  # candidates of one line
_WHY = {
    "fewest_boxes": "it had the fewest boxes",
    "only_host": "no other host could be taken",
    "seat": "its seat is there",
    "launched": "its seat is there, this is its first request",
    "moved": "it had to move",
    "soonest": "it is thought to end first there",
    "sticky": "it is at home there and no other is worth a move",
    "rehomed": "its home takes no turns, and it ends first there",
    "nothing_cached_at_home": "its home has nothing of it cached",
}


def of(episode: Episode, fleet: Fleet) -> list[Waiting]:
    """A line for each choice that was made for it."""
    told = [_box(episode), _seat(episode, fleet), _request(episode)]
    return [Waiting(episode.id, line) for line in told if line]


def _box(episode: Episode) -> str:
    picked = episode.picked
    if not picked.host:
        return ""
    return f"its box is on {picked.host}: {_because(picked.why)}{_figures(picked.terms, 'boxes')}"


def _seat(episode: Episode, fleet: Fleet) -> str:
    home, terms = fleet.seat(episode.id)
    if home not in terms:
        return ""  # it moved since, or a former router chose
    least = "the replica with the least given away"
    return f"its seat is on {home}: {least}{_figures(terms, 'tokens given room')}"


def _request(episode: Episode) -> str:
    placed = episode.placed
    if not placed.replica:
        return ""
    told = f"its newest request went to {placed.replica}: {_because(placed.why)}"
    told += _figures(placed.terms, "predicted")
    if placed.cached:
        told += f", {placed.cached:,} of its tokens thought to be cached there"
    return told + _held(placed.held)


def _held(terms: Mapping[str, float]) -> str:
    if not terms:
        return ""
    told = f"; it was held for {terms['held_s']:.1f} s before: it needed {terms['tokens']:,.0f}"
    told += f" tokens beside {terms['live']:,.0f} of {terms['kv']:,.0f}"
    return f"{told}, with {terms['before']:.0f} before it in rank"


def _because(why: str) -> str:
    return _WHY.get(why, why.replace("_", " "))


def _figures(terms: Mapping[str, float], unit: str) -> str:
    """The least first: that is what was looked for."""
    ranked = sorted(terms.items(), key=lambda one: (one[1], one[0]))
    if not ranked:
        return ""
    shown = ", ".join(f"{name} {value:,.6g}" for name, value in ranked[:_SHOWN])
    more = f" and {len(ranked) - _SHOWN} more" if len(ranked) > _SHOWN else ""
    return f" ({unit}: {shown}{more})"
