"""Parts of every text view: cleaned lines, units, a console that breaks no table.

Owns: how figures read. Promise: text from tasks and boxes reaches the terminal cleaned (clean.py)
and without markup; where no terminal is, nothing is wrapped or cut to a width.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, TYPE_CHECKING

from rich.text import Text

from muster.bias import Bias
from muster.clean import clean

if TYPE_CHECKING:
    from rich.console import Console

_WIDE = 10_000  # columns where there is no terminal to fit


def console(file: IO[str] | None = None) -> Console:
    """For standard output (or `file`): as wide as the terminal, or as wide as it takes."""
    from rich.console import Console

    out = file or sys.stdout
    return Console(file=out, width=None if out.isatty() else _WIDE)


def safe(text: str, width: int = 200) -> Text:
    """One line of untrusted text; what does not fit is replaced by an ellipsis."""
    line = " ".join(clean(text, longest=4 * width).split())
    return Text(line if len(line) <= width else line[: width - 1] + "…")


def fitted(lines: Iterable[str], columns: int | None = None) -> list[str]:
    """Broken between words at the terminal's width (or `columns`), the rest indented; as they are
    where no terminal is. Lines to be copied ("next: …") stay whole."""
    if columns is None:
        if not sys.stdout.isatty():
            return list(lines)
        columns = shutil.get_terminal_size().columns
    return [part for line in lines for part in _broken(line, columns)]


def _broken(line: str, columns: int) -> list[str]:
    if len(line) <= columns or line.startswith("next: "):
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.wrap(
        line,
        max(columns, 20),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in counts.items()) or "none"


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    if value >= 120:
        return f"{int(value) // 60} min {int(value) % 60:02d} s"
    return f"{value:.1f} s" if value >= 10 else f"{value:.2f} s"


def number(value: float | None, digits: int = 4) -> str:
    return "–" if value is None else f"{value:.{digits}g}"


def share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def bias_lines(found: Bias) -> Iterator[str]:
    """Dispatched against trained, in two lines; nothing before a cohort is settled."""
    if not found.cohorts_settled:
        return
    yield (
        f"trained against dispatched, {found.cohorts_settled} settled cohorts: largest KS distance "
        f"of durations {number(found.ks_duration_max, 2)}, of lengths "
        f"{number(found.ks_tokens_max, 2)}; pass rate {_signed(found.pass_rate_difference)}"
    )
    if found.lag_slope_per_s is not None:
        yield f"lag grows by {found.lag_slope_per_s:.2g} versions per second of an episode"


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:+.1f} points"
