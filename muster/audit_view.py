"""The audit as text: problems, notes, bias, totals, the verdict last.

Owns: labels, layout. Promise: what is left out is said. Does not cover: the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from muster.audit import Audit
from muster.bias import Bias, Cohort
from muster.finding import Finding
from muster.view import bias_lines, counted, number, safe, seconds, share

FINDINGS_MAX = 40
COHORTS_MAX = 8
Show = Callable[[float | None], str]


def render_audit(found: Audit) -> RenderableType:
    """Problems, then notes, then totals and the verdict."""
    t = found.totals
    notes = [f for f in found.findings if f not in found.problems]
    lines: list[RenderableType] = [
        *_findings("problem", "bold red", found.problems),
        *_findings("note", "dim", notes),
        *_bias(found.bias),
        Text(
            f"groups {t.groups} = {t.groups_trained} trained + {t.groups_filtered} filtered + "
            + (f"{t.groups_evaluated} evaluated + " if t.groups_evaluated else "")
            + f"{t.groups_open} open"
            + (f"; {t.groups_retired} retired, by their totals" if t.groups_retired else "")
        ),
        Text(
            f"siblings {t.siblings_dispatched} = {t.siblings_trained} trained + "
            f"{t.siblings_filtered} filtered + "
            + (f"{t.siblings_evaluated} evaluated + " if t.siblings_evaluated else "")
            + f"{t.siblings_open} open; {t.siblings_repaired} repaired"
        ),
        Text(
            f"attempts {t.attempts} = {t.attempts_finished} finished + "
            f"{t.attempts_running} running + {t.attempts_abandoned} abandoned; "
            f"{counted(t.outcomes)}"
        ),
        Text(f"batches {t.batches_frozen} frozen, {t.batches_trained} trained"),
        Text.assemble(safe(f"audit of run {found.run}:"), " ", _verdict(found)),
    ]
    return Group(*lines)


def _verdict(found: Audit) -> tuple[str, str]:
    if found.ok:
        return "clean: every trajectory once, every group one fate or a reason", "bold green"
    return f"{len(found.problems)} problems", "bold red"


def _findings(word: str, style: str, found: Sequence[Finding]) -> Iterable[Text]:
    for finding in found[:FINDINGS_MAX]:
        yield Text.assemble((f"{word} ", style), safe(f"{finding.where}: {finding.what}"))
    if len(found) > FINDINGS_MAX:
        yield Text(f"… and {len(found) - FINDINGS_MAX} more {word}s: --json lists all", style=style)


def _bias(found: Bias) -> list[RenderableType]:
    shown = found.cohorts[-COHORTS_MAX:]
    if not shown:
        return []
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("after batch", no_wrap=True)
    for name in ("groups", "open", "duration", "tokens", "pass rate", "KS s", "KS tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for cohort in shown:
        table.add_row(*_cohort(cohort))
    parts: list[RenderableType] = [
        Text("dispatched → trained, by launch cohort", "bold"),
        table,
        Text(
            "KS: largest distance of the two distributions, 0 equal to 1 disjoint; in brackets "
            "each episode counts by its gradient weight",
            style="dim",
        ),
    ]
    if len(found.cohorts) > len(shown):
        left = len(found.cohorts) - len(shown)
        parts.append(Text(f"{left} earlier cohorts not shown: --json", style="dim"))
    return [*parts, *map(safe, bias_lines(found))]


def _cohort(c: Cohort) -> list[str]:
    def pair(show: Show, before: float | None, after: float | None) -> str:
        return f"{show(before)} → {show(after)}"

    return [
        str(c.after_batch or "start"),
        str(c.groups),
        str(c.groups_open),
        pair(seconds, c.dispatched.duration_mean_s, c.trained.duration_mean_s),
        pair(number, c.dispatched.tokens_mean, c.trained.tokens_mean),
        pair(share, c.dispatched.pass_rate, c.trained.pass_rate),
        f"{number(c.ks_duration, 2)} ({number(c.ks_duration_weighted, 2)})",
        f"{number(c.ks_tokens, 2)} ({number(c.ks_tokens_weighted, 2)})",
    ]
