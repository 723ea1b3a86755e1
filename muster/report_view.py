"""The report as text for a terminal of 80 columns or more.

Owns: layout. Promise: what is left out is said; the bottleneck comes last.
Does not cover: the words (report_rows.py), the audit (audit_view.py), cleaning (view.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from muster.figures import BatchReport, RunReport
from muster.report_rows import (
    bottleneck_parts,
    failures,
    headline,
    legend,
    lines,
    named,
    rows,
)
from muster.view import safe

COLUMNS_MAX = 3
REMARKS_MAX = 12


def render(report: RunReport) -> RenderableType:
    """The newest batches side by side, the run's totals, remarks, the bottleneck last."""
    shown = report.batches[-COLUMNS_MAX:]
    head = (safe(f"run {report.run}").plain, "bold")
    parts: list[RenderableType] = [Text.assemble(head, f": {headline(report)}")]
    if shown:
        parts += [_batches(shown), *[safe(line, 400) for line in legend(shown)]]
        parts += [safe(line, 600) for line in (*failures(shown), *named(shown))]
        left_out = len(report.batches) - len(shown)
        if left_out:
            parts.append(
                Text(f"{left_out} earlier batches not shown: --batch N or --json", style="dim")
            )
    parts += [Text(), *[safe(line, 400) for line in lines(report)]]
    parts += [safe(f"remark: {remark}", 400) for remark in report.remarks[:REMARKS_MAX]]
    if len(report.remarks) > REMARKS_MAX:
        more = len(report.remarks) - REMARKS_MAX
        parts.append(Text(f"{more} more remarks: --json", style="dim"))
    what, setting = bottleneck_parts(report)
    parts += [Text(), Text.assemble("bottleneck: ", (what, "bold"), f"; {setting}")]
    return Group(*parts)


def _batches(shown: Sequence[BatchReport]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    for batch in shown:
        mark = "" if batch.stage == "trained" else " *"
        table.add_column(f"batch {batch.step}{mark}", justify="right", no_wrap=True)
    for label, cells in rows(shown):
        indent = len(label) - len(label.lstrip())
        name = Text(" " * indent + safe(label, 36).plain, style="" if indent else "bold")
        table.add_row(name, *[safe(cell) for cell in cells])
    if any(batch.stage != "trained" for batch in shown):
        table.caption = "* leased, not yet acknowledged"
    return table
