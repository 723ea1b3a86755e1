"""The last section of docs/results/routing.md: what a run of the routing benchmark measured.

Owns: the form of its table. Promise: every figure is of that run; muster and its placement alone
stand in one row against the best of the six published policies of the case. Does not cover: the
rest of the page, which is written by hand; the figures (routing.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sim.rollout.routing import ALONE, CASES, OTHERS, OURS

PAGE = Path(__file__).resolve().parent.parent / "docs/results/routing.md"
_SECTION = "## Measured\n"


def section(result: dict[str, Any]) -> Iterator[str]:
    """Its lines, of a result of bench.routing."""
    figures, told, settings = result["figures"], result["ratios"], result["settings"]
    word = "a quick run, which supports no claim" if settings["quick"] else "judging seeds"
    yield _SECTION
    yield (
        f"Seeds {settings['seeds']} ({word}), {settings['groups']} groups each. Ratios: mean group "
        "finish of the best published policy of the case (by its mean over all seeds) over that of "
        f"the arm; above 1 the arm is faster; 95 % interval over seeds. *{OURS}* also decides who "
        f"may go on (admission and rank), *{ALONE}* is its placement alone, admission none as in "
        "the published ones."
    )
    yield ""
    yield (
        f"| case | best published | finish s | {OURS} s | ratio | {ALONE} s | ratio | "
        f"recomputed Mtok: best, {OURS}, {ALONE} |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for case in (case.name for case in CASES):
        finish = {n: figures[f"{case}_{n}_group_finish_s"] for n in (OURS, ALONE, *OTHERS)}
        best = min(OTHERS, key=lambda name: (finish[name], name))
        again = [figures[f"{case}_{name}_recomputed_mtok"] for name in (best, OURS, ALONE)]
        cells = [case, best, f"{finish[best]:,.0f}"]
        for name in (OURS, ALONE):
            cells += [f"{finish[name]:,.0f}", _ratio(told, f"{case}_best_other_over_{name}")]
        yield f"| {' | '.join(cells)} | {', '.join(f'{tokens:.1f}' for tokens in again)} |"
    yield ""
    yield f"| case | {' | '.join(OTHERS)} |"
    yield f"|---|{'---|' * len(OTHERS)}"
    for case in (case.name for case in CASES):
        cells = [f"{figures[f'{case}_{name}_group_finish_s']:,.0f}" for name in OTHERS]
        yield f"| {case}, finish s | {' | '.join(cells)} |"


def written(page: str, result: dict[str, Any]) -> str:
    """The page with this section in the place of the former one."""
    head = page.partition(_SECTION)[0].rstrip("\n")
    return f"{head}\n\n" + "\n".join(section(result)) + "\n"


def _ratio(told: dict[str, float], name: str) -> str:
    value = f"{told[name]:.3f}"
    low, high = told.get(f"{name}_low"), told.get(f"{name}_high")
    return value if low is None else f"{value} [{low:.3f}, {high:.3f}]"
