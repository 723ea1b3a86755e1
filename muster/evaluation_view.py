"""An evaluation's result as text: the tasks, all together, by version, the serving, the warnings.

Owns: labels, layout. Promise: everything shown is cleaned; a result that is not whole says so
first. Does not cover: the figures (evaluation.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from muster.evaluation import EvaluationResult, Interval, TaskFigures
from muster.fingerprint import text
from muster.view import number, safe, seconds, share

_TASKS_MAX = 60


def render_evaluation(found: EvaluationResult) -> RenderableType:
    """Worst tasks last, so that a terminal ends with what matters: the whole, then the doubts."""
    return Group(_table(found), *map(safe, _lines(found)), *_warnings(found))


def _table(found: EvaluationResult) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("task", no_wrap=True)
    for name in ("samples", "passed", "pass rate", "95 %", "reward", "infra", "turns", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    shown = found.tasks[:_TASKS_MAX]
    for task in shown:
        table.add_row(safe(task.task, 60), *_row(task))
    if len(found.tasks) > len(shown):
        left = len(found.tasks) - len(shown)
        return Group(table, Text(f"… and {left} more tasks: --json or --out has all", style="dim"))
    return table


def _row(t: TaskFigures) -> list[str]:
    return [
        str(t.samples),
        str(t.passed),
        share(t.pass_rate),
        interval(t.pass_interval),
        number(t.reward_mean, 3),
        str(t.infra),
        number(t.turns_mean, 3),
        number(t.sampled_tokens_mean, 3),
    ]


def interval(found: Interval | None) -> str:
    return "–" if found is None else f"{found.low:.0%} – {found.high:.0%}"


def _lines(found: EvaluationResult) -> Iterator[str]:
    o, asked = found.overall, found.asked
    if not found.complete:
        yield f"not whole: {asked.job} is {asked.state}"
    yield (
        f"pass rate {share(o.pass_rate)} (mean over {o.tasks} tasks; 95 %: "
        f"{interval(o.pass_interval)}), {o.tasks_solved} of {o.tasks} solved at least once"
    )
    yield (
        f"samples {o.samples}: {o.passed} passed of {o.valid} valid, {o.infra} lost to "
        f"infrastructure; {o.repaired} attempts made again"
    )
    yield (
        f"reward {number(o.reward_mean)}, turns {number(o.turns_mean, 3)}, tokens "
        f"{number(o.sampled_tokens_mean, 3)} a sample; {o.sampled_tokens:,} sampled in "
        f"{seconds(found.wall_s)}"
    )
    s = asked.sampling
    cut = f", top_p {s.top_p:g}" * (s.top_p != 1) + f", top_k {s.top_k}" * (s.top_k != 0)
    yield f"sampled at temperature {s.temperature:g}{cut}" + f", model {asked.model}" * bool(
        asked.model
    )
    for version in found.versions:
        named = "–".join(map(str, dict.fromkeys((version.versions[0], version.versions[-1]))))
        yield (
            f"version {named}: pass rate {share(version.pass_rate)} "
            f"({interval(version.pass_interval)}), {version.passed} of {version.valid} samples"
        )
    for one in found.serving:
        yield f"replica {one.replica}: {text(one.fingerprint) if one.fingerprint else one.told}"


def _warnings(found: EvaluationResult) -> Iterator[Text]:
    for warning in found.warnings:
        yield Text.assemble(("warning ", "bold yellow"), safe(warning, 400))
