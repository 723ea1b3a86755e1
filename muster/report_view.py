"""Report and audit as text for a terminal of 80 columns or more.

Owns: labels, units, layout. Promise: text from tasks and boxes reaches the terminal with its
control characters shown, never obeyed; what is left out is said. Does not cover: the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from muster.audit import Audit
from muster.finding import Finding
from muster.record import Publication
from muster.report import BatchReport, RunReport, Trained
from muster.split import PARTS
from muster.telemetry import printable

COLUMNS_MAX = 3
FINDINGS_MAX = 40
Row = tuple[str, Callable[[BatchReport], str]]


def safe(text: str, width: int = 200) -> Text:
    """One line of untrusted text; what does not fit is replaced by an ellipsis."""
    line = " ".join(printable(text).split())
    return Text(line if len(line) <= width else line[: width - 1] + "…")


def render(report: RunReport) -> RenderableType:
    """The newest batches side by side, the run's totals, the bottleneck last."""
    shown = report.batches[-COLUMNS_MAX:]
    parts: list[RenderableType] = [_headline(report)]
    if shown:
        parts += [_batches(shown), *_failures(shown)]
        left_out = len(report.batches) - len(shown)
        if left_out:
            parts.append(
                Text(f"{left_out} earlier batches not shown: --batch N or --json", style="dim")
            )
    parts += [Text(), _totals(report), Text(), _bottleneck(report)]
    return Group(*parts)


def render_audit(found: Audit) -> RenderableType:
    """Problems, then notes, then totals and the verdict."""
    t = found.totals
    notes = [f for f in found.findings if f not in found.problems]
    lines: list[RenderableType] = [
        *_findings("problem", "bold red", found.problems),
        *_findings("note", "dim", notes),
        Text(
            f"groups {t.groups} = {t.groups_trained} trained + {t.groups_filtered} filtered + "
            f"{t.groups_open} open"
        ),
        Text(
            f"siblings {t.siblings_dispatched} = {t.siblings_trained} trained + "
            f"{t.siblings_filtered} filtered + {t.siblings_open} open; "
            f"{t.siblings_repaired} repaired"
        ),
        Text(
            f"attempts {t.attempts} = {t.attempts_finished} finished + "
            f"{t.attempts_abandoned} abandoned; {_counted(t.outcomes)}"
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


def _headline(report: RunReport) -> Text:
    t = report.totals
    return Text.assemble(
        (safe(f"run {report.run}").plain, "bold"),
        f": {t.groups_trained} groups trained, {t.groups_filtered} filtered, "
        f"{t.groups_open} open; {t.trajectories} trajectories in {_seconds(t.wall_s)}",
    )


def _batches(shown: Sequence[BatchReport]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    for batch in shown:
        mark = "" if batch.stage == "trained" else " *"
        table.add_column(f"batch {batch.step}{mark}", justify="right", no_wrap=True)
    rows: list[Row] = [
        *_TIME,
        *[(f"  {part}", _part(part)) for part in PARTS if any(b.split[part] for b in shown)],
        *_COLLECTED,
        *[
            (f"  {name}", _outcome(name))
            for name in dict.fromkeys(name for b in shown for name in b.outcomes)
        ],
        *_TRAINED,
        *_publications(shown),
    ]
    for label, show in rows:
        indent = len(label) - len(label.lstrip())
        name = Text(" " * indent + safe(label, 36).plain, style="" if indent else "bold")
        table.add_row(name, *[safe(show(b)) for b in shown])
    if any(batch.stage != "trained" for batch in shown):
        table.caption = "* leased, not yet acknowledged"
    return table


def _totals(report: RunReport) -> RenderableType:
    t = report.totals
    lines = [
        f"outcomes: {_counted(t.outcomes)}",
        f"tokens sampled {t.tokens_sampled:,}; repairs {t.repairs}; "
        f"versions published {t.versions_published}; jobs {t.jobs}",
    ]
    if t.filtered_reasons:
        lines.append(f"filtered because: {_counted(t.filtered_reasons)}")
    return Group(*[safe(line, 400) for line in lines])


def _bottleneck(report: RunReport) -> Text:
    found = report.bottleneck
    if found is None:
        return Text(
            "bottleneck: no batch is complete yet; `muster audit` says what groups wait for"
        )
    what = "the trainer" if found.part == "trainer" else found.part.replace("_", " ")
    return Text.assemble(
        "bottleneck: ",
        (f"{what} ({found.share:.0%} of the time)", "bold"),
        f"; setting: {found.setting}: {found.advice}",
    )


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in counts.items()) or "none"


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    if value >= 120:
        return f"{int(value) // 60} min {int(value) % 60:02d} s"
    return f"{value:.1f} s" if value >= 10 else f"{value:.2f} s"


def _number(value: float | None, digits: int = 4) -> str:
    return "–" if value is None else f"{value:.{digits}g}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _part(part: str) -> Callable[[BatchReport], str]:
    def show(b: BatchReport) -> str:
        whole = b.time_to_trainable_batch_s
        share = b.split[part] / whole if whole else 0.0
        return f"{_seconds(b.split[part])} {share:4.0%}"

    return show


def _outcome(name: str) -> Callable[[BatchReport], str]:
    return lambda b: str(b.outcomes.get(name, 0))


def _of(show: Callable[[Trained], str]) -> Callable[[BatchReport], str]:
    return lambda b: show(b.trained) if b.trained else "–"


def _publications(shown: Sequence[BatchReport]) -> list[Row]:
    """Three rows per replica."""
    replicas = dict.fromkeys(p.replica for b in shown if b.trained for p in b.trained.publications)
    return [
        (f"  {replica}: {label}", _publication(replica, show))
        for replica in replicas
        for label, show in _PUBLICATION
    ]


def _publication(replica: str, show: Callable[[Publication], str]) -> Callable[[BatchReport], str]:
    def found(trained: Trained) -> str:
        mine = [p for p in trained.publications if p.replica == replica]
        return "–" if not mine else "failed" if mine[-1].error else show(mine[-1])

    return _of(found)


def _failures(shown: Sequence[BatchReport]) -> list[Text]:
    return [
        safe(f"batch {b.step} was not published to {p.replica}: {p.error}", 400)
        for b in shown
        if b.trained
        for p in b.trained.publications
        if p.error
    ]


_PUBLICATION: list[tuple[str, Callable[[Publication], str]]] = [
    ("latency", lambda p: _seconds(p.latency_s)),
    ("pause", lambda p: _seconds(p.pause_s)),
    ("token gap", lambda p: _seconds(p.token_gap_s)),
]
_TIME: list[Row] = [
    (
        "time to trainable batch",
        lambda b: _seconds(b.time_to_trainable_batch_s) + (" cold" if b.cold else ""),
    ),
]
_COLLECTED: list[Row] = [
    ("straggler tail", lambda b: _seconds(b.straggler_tail_s)),
    ("interval between batches", lambda b: _seconds(b.interval_s)),
    ("trainer's own time", lambda b: _seconds(b.think_s)),
    ("pass rate", lambda b: _share(b.pass_rate)),
    ("mean reward", lambda b: _number(b.reward_mean)),
    ("groups with variance", lambda b: f"{b.groups_with_variance} of {b.groups}"),
    ("lag mean / max (versions)", lambda b: f"{_number(b.lag_mean)} / {_number(b.lag_max)}"),
    ("tokens sampled", lambda b: f"{b.tokens_sampled:,}"),
    ("tokens of prompts", lambda b: f"{b.tokens_prompt:,}"),
    ("  cached", lambda b: f"{b.tokens_cached:,}"),
    ("repairs", lambda b: str(b.repairs)),
    ("outcomes", lambda b: f"{b.trajectories}"),
]
_TRAINED: list[Row] = [
    ("version", _of(lambda t: f"{t.parent} → {t.version}")),
    ("loss", _of(lambda t: _number(t.step.loss))),
    ("step KL", _of(lambda t: _number(t.step_kl))),
    ("mismatch k1", _of(lambda t: _number(t.step.mismatch_k1))),
    ("mismatch k3", _of(lambda t: _number(t.step.mismatch_k3))),
    ("mismatch max |Δlogp|", _of(lambda t: _number(t.step.mismatch_max_abs))),
    ("training", _of(lambda t: _seconds(t.step.train_s))),
    ("published to replicas", _of(lambda t: str(sum(not p.error for p in t.publications)))),
]
