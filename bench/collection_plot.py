"""The plot of bench.collection: seconds per batch by what they are spent on, as SVG.

Owns: the drawing. Promise: text and rectangles only, no dependency; the bars of a regime share one
scale, and each bar is as long as its mean interval. Does not cover: the figures.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from bench.collection_plan import MAIN
from bench.collection_tables import Study
from sim.rollout.doing import Doing

_COLOURS = {
    Doing.QUEUE: "#9aa5b1",
    Doing.PREFILL: "#d9822b",
    Doing.DECODE: "#2b6cb0",
    Doing.BOX_START: "#805ad5",
    Doing.TOOL: "#2f855a",
    Doing.VERIFY: "#68d391",
    Doing.HOLD: "#ecc94b",
    Doing.TRANSFER: "#4a5568",
}
_WIDTH, _LEFT, _BAR, _ROW = 860, 110, 640, 26
_TEXT = 'font-family="sans-serif" font-size="13" fill="#222"'


def drawn(study: Study) -> str:
    """The whole file."""
    rows = [*_rows(study)]
    height = len(rows) * _ROW + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        *_legend(),
    ]
    for number, row in enumerate(rows):
        y = 40 + number * _ROW
        parts += [part.replace("{y}", str(y)).replace("{t}", str(y + 15)) for part in row]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend() -> Iterator[str]:
    x = _LEFT
    for doing, colour in _COLOURS.items():
        yield f'<rect x="{x}" y="10" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{x + 16}" y="21" {_TEXT}>{doing}</text>'
        x += 30 + 8 * len(str(doing))


def _rows(study: Study) -> Iterator[list[str]]:
    for regime in study.plan.regimes:
        yield [f'<text x="4" y="{{t}}" {_TEXT} font-weight="bold">{regime}</text>']
        split = {arm: _mean_split(study, arm, regime) for arm in MAIN}
        longest = max(sum(found.values()) for found in split.values())
        for arm, found in split.items():
            yield [*_bar(arm, found, _BAR / longest)]


def _mean_split(study: Study, arm: str, regime: str) -> dict[Doing, float]:
    told = [result.figures.split_s for result in study.main(arm, regime)]
    return {doing: statistics.fmean(split[str(doing)] for split in told) for doing in Doing}


def _bar(arm: str, found: dict[Doing, float], scale: float) -> Iterator[str]:
    yield f'<text x="{_LEFT - 8}" y="{{t}}" text-anchor="end" {_TEXT}>{arm}</text>'
    x = float(_LEFT)
    for doing, seconds in found.items():
        width = seconds * scale
        colour = _COLOURS[doing]
        yield f'<rect x="{x:.1f}" y="{{y}}" width="{width:.1f}" height="20" fill="{colour}"/>'
        x += width
    yield f'<text x="{x + 6:.1f}" y="{{t}}" {_TEXT}>{sum(found.values()):,.0f} s</text>'
