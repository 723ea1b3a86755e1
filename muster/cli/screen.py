"""What a person, or a program with --json, sees while services and jobs run.

Three faces of one thing: a live table on a terminal, a line per change elsewhere, JSON lines for
programs. Promise: everything shown is cleaned (muster/clean.py).
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

import msgspec

from muster.clean import clean
from muster.client import JobState, Progress
from muster.report import RunReport
from muster.report_view import render
from muster.supervise.machine import Report
from muster.types import Purpose
from muster.view import console

if TYPE_CHECKING:
    from rich.console import RenderableType


class Screen(Protocol):
    """Shows progress between `with` and its end."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def line(self, text: str) -> None:
        """A line that stays."""

    def service(self, report: Report) -> None:
        """A service changed its phase."""

    def job(self, progress: Progress) -> None:
        """A job moved on."""

    def report(self, found: RunReport) -> None:
        """What the run achieved."""


def screen(as_json: bool) -> Screen:
    """The face that fits: --json, a terminal, or neither."""
    if as_json:
        return JsonScreen()
    return LiveScreen() if sys.stdout.isatty() else LineScreen()


def emit(kind: str, value: Any) -> None:
    """One JSON object on a line of its own: {"event": kind, ...}."""
    data = msgspec.to_builtins(value)
    print(msgspec.json.encode({"event": kind, **data}).decode(), flush=True)


class _Plain:
    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None


class JsonScreen(_Plain):
    """For programs."""

    def line(self, text: str) -> None:
        emit("line", {"text": clean(text)})

    def service(self, report: Report) -> None:
        emit("service", {"service": report.service, "phase": report.phase, "detail": report.detail})

    def job(self, progress: Progress) -> None:
        emit("job", progress)

    def report(self, found: RunReport) -> None:
        emit("report", found)


class LineScreen(_Plain):
    """For logs and pipes: a line per change of a service or of a job's groups."""

    def __init__(self) -> None:
        self._groups: tuple[JobState | int, ...] = ()

    def line(self, text: str) -> None:
        print(clean(text), flush=True)

    def service(self, report: Report) -> None:
        detail = f"  {report.detail}" if report.detail else ""
        self.line(f"{report.service:<11} {report.phase}{detail}")

    def job(self, progress: Progress) -> None:
        p = progress
        counts = (p.groups_opened, p.groups_complete, p.groups_trained, p.groups_filtered)
        groups = (p.state, *counts, p.groups_evaluated, p.policy_version)
        if groups != self._groups:
            self._groups = groups
            self.line(summary(progress))

    def report(self, found: RunReport) -> None:
        console().print(render(found))


class LiveScreen:
    """For terminals: the services' phases and the job's counts, in place."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._reports: dict[str, Report] = {}
        self._progress: Progress | None = None
        self._console = Console()
        self._live = Live(console=self._console, refresh_per_second=8, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def line(self, text: str) -> None:
        self._console.print(clean(text), markup=False, highlight=False)

    def service(self, report: Report) -> None:
        self._reports[report.service] = report
        self._live.update(self._render())

    def job(self, progress: Progress) -> None:
        self._progress = progress
        self._live.update(self._render())

    def report(self, found: RunReport) -> None:
        self._console.print(render(found))

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for report in self._reports.values():
            color = _COLORS.get(report.phase, "yellow")
            detail = clean(report.detail)
            table.add_row(report.service, Text(report.phase, style=color), Text(detail, "dim"))
        if self._progress is None:
            return table
        return Group(table, Text(summary(self._progress)))


_COLORS = {"ready": "green", "gone": "dim", "stopping": "dim"}


def summary(progress: Progress) -> str:
    """A job in one line."""
    p = progress
    outcomes = ", ".join(f"{count} {name}" for name, count in p.outcomes.items())
    waiting = f" · waiting for {p.waiting_for}" if p.waiting_for else ""
    filtered = f", {p.groups_filtered} filtered" if p.groups_filtered else ""
    repairs = f", {p.repairs} repaired" if p.repairs else ""
    evaluates = p.purpose is Purpose.EVALUATE
    done, what = (p.groups_evaluated, "evaluated") if evaluates else (p.groups_trained, "trained")
    return (
        f"{p.job} {p.state}: {done} of {p.groups_total} groups {what} "
        f"({p.groups_opened} opened, {p.groups_complete} complete{filtered}) · "
        f"episodes {p.episodes_running} running, {p.episodes_finished} finished{repairs} · "
        f"{p.turns} turns · version {p.policy_version}"
        + (f" · {outcomes}" if outcomes else "")
        + waiting
    )


def fell_short(progress: Progress) -> str:
    """Why a job ended with fewer groups trained than were asked for; empty when it did not."""
    p = progress
    short = p.groups_trained < p.groups_total and p.purpose is Purpose.TRAIN
    if p.state is not JobState.DONE or not short:
        return ""
    return (
        f"it gave up with {p.groups_trained} of {p.groups_total} groups trained: "
        f"of {p.groups_filtered} filtered groups {min(p.groups_filtered, p.groups_total)} were "
        "replaced, which is at most one for each group asked for"
    )
