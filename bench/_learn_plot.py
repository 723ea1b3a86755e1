"""The plot of bench.learn: mean reward over the steps of the training, as SVG.

Owns: the drawing. Promise: text and lines only, no dependency; one line a run, its evaluations as
marks before the first and after the last step. Does not cover: the figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bench._learn_page import WANTED, Results

_COLOURS = dict(zip(WANTED, ("#2b6cb0", "#2f855a", "#d9822b", "#c53030", "#805ad5"), strict=True))
_LEFT, _TOP, _WIDE, _HIGH = 60, 20, 620, 260
_TEXT = 'font-family="sans-serif" font-size="13" fill="#222"'


def drawn(results: Results) -> str:
    """The whole file."""
    shown = [key for key in WANTED if key in results]
    longest = max(len(results[key]["training"]["steps"]) for key in shown)
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 350" width="860" height="350">',
        '<rect width="860" height="350" fill="#fff"/>',
        *_axes(longest),
    ]
    for number, key in enumerate(shown):
        parts += _run(results[key], _COLOURS[key], longest)
        y = _TOP + 14 + 22 * number
        parts.append(f'<rect x="700" y="{y - 10}" width="12" height="12" fill="{_COLOURS[key]}"/>')
        parts.append(f'<text x="718" y="{y}" {_TEXT}>{key[0]}, seed {key[1]}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axes(longest: int) -> Iterator[str]:
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = _y(share)
        yield f'<line x1="{_LEFT}" y1="{y}" x2="{_LEFT + _WIDE}" y2="{y}" stroke="#ddd"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end" {_TEXT}>{share:.0%}</text>'
    below = _TOP + _HIGH + 30
    yield f'<text x="{_LEFT}" y="{below}" {_TEXT}>untrained</text>'
    yield (
        f'<text x="{_LEFT + _WIDE}" y="{below}" text-anchor="end" {_TEXT}>trained ({longest} steps)'
        "</text>"
    )
    told = (
        "lines: reward of the training batches, each with its neighbours; "
        "marks: held out, at the untrained model's best temperature"
    )
    yield f'<text x="{_LEFT}" y="{below + 22}" {_TEXT}>{told}</text>'


def _run(found: Mapping[str, Any], colour: str, longest: int) -> Iterator[str]:
    rewards = [step["reward"] for step in found["training"]["steps"]]
    points = " ".join(
        f"{_x(number + 1, longest)},{_y(reward)}" for number, reward in enumerate(_smooth(rewards))
    )
    yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
    best = found["figures"]["best_temperature"]
    for phase, step in (("before", 0), ("after", longest + 1)):
        y = _y(found["figures"][f"{phase}_{best:g}_percent"] / 100)
        yield f'<circle cx="{_x(step, longest)}" cy="{y}" r="5" fill="{colour}"/>'


def _smooth(rewards: list[float]) -> Iterator[float]:
    """Mean of each step and its two neighbours."""
    for at in range(len(rewards)):
        near = rewards[max(0, at - 1) : at + 2]
        yield sum(near) / len(near)


def _x(step: float, longest: int) -> float:
    return round(_LEFT + _WIDE * step / (longest + 1), 1)


def _y(share: float) -> float:
    return round(_TOP + _HIGH * (1 - share), 1)
