"""Tracked rows on disk: `steps.jsonl`, TensorBoard event files, and what the run was served by.

Owns: those files below state_dir/tracking/RUN. Promise: a row is one line, appended whole and on
disk before anything follows from it; a torn last line (a crash while writing) is cut off at the
next start, and its row is written again; the JSON lines alone are remembered, and the boards follow
them: at a start the newest step is drawn again and TensorBoard told to forget what it had from that
step on, so that none is missing or doubled there either. Does not cover: which rows (tracking.py).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from muster import telemetry
from muster.errors import InvalidInput
from muster.evaluation import Training
from muster.tracking import Row

STEPS, BOARDS, SERVED = "steps.jsonl", "tensorboard", "served.json"
_log = telemetry.logger("muster.tracking")


class Sink(Protocol):
    """Draws rows somewhere else."""

    def draw(self, row: Row) -> None: ...

    def close(self) -> None: ...


class Tracked:
    """The files of one run. One process at a time writes here: the trainer in charge."""

    def __init__(self, folder: Path, sinks: Sequence[Sink] = ()):
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._sinks = folder / STEPS, sinks
        self._folder = folder
        _cut_torn_end(self._path)
        rows = read_rows(self._path)
        for row in _newest_of_lines(rows):
            for sink in sinks:
                sink.draw(row)
        self.rows = [_bare(row) for row in rows]  # what is written, without figures

    def write(self, rows: Iterable[Row]) -> None:
        """Raises OSError."""
        for row in rows:
            line = msgspec.json.encode(row) + b"\n"
            handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                _append(handle, line)
                os.fsync(handle)
            finally:
                os.close(handle)
            self.rows.append(_bare(row))
            for sink in self._sinks:
                sink.draw(row)

    def served(self, training: Training) -> None:
        """Keep what an evaluation without this run's services compares itself with."""
        path, data = self._folder / SERVED, msgspec.json.encode(training)
        if path.exists() and path.read_bytes() == data:
            return
        aside = path.with_name(f".{SERVED}.{os.getpid()}")
        aside.write_bytes(data)
        aside.replace(path)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


class Boards:
    """TensorBoard event files, a folder for each line of the run. tensorboardX writes them."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._writers: dict[int, Any] = {}

    def draw(self, row: Row) -> None:
        if row.kind == "rollback":
            return
        writer = self._writers.get(row.line)
        if writer is None:
            from tensorboardX import SummaryWriter

            where = self._folder / f"line-{row.line}"
            # Names hold the second alone: a start within it must not write over a former file.
            suffix = f".{len(list(where.glob('events.*'))):04d}"
            writer = SummaryWriter(str(where), purge_step=row.step, filename_suffix=suffix)
            self._writers[row.line] = writer
        for name, value in row.figures.items():
            writer.add_scalar(name, value, row.step, walltime=row.at_unix_s)
        writer.flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


def boards(folder: Path) -> list[Sink]:
    """None where tensorboardX is not installed, which is said."""
    try:
        import tensorboardX
    except ImportError as error:
        _log.warning("no TensorBoard files: %s (pip install tensorboardX)", error)
        return []
    del tensorboardX
    return [Boards(folder / BOARDS)]


def read_rows(path: Path) -> list[Row]:
    """All whole lines, in order; a torn last one is left out. Raises InvalidInput for others."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last \n is torn
        try:
            rows.append(msgspec.json.decode(line, type=Row))
        except msgspec.DecodeError as error:
            raise InvalidInput(
                f"line {number} is no row ({error})",
                field="tracking",
                value=path,
                way_out="mend it, or set the file aside: tracking then begins anew",
            ) from error
    return rows


def read_served(state_dir: Path, run: str) -> Training | None:
    """What that run was trained with, as far as it was kept."""
    path = state_dir / "tracking" / run / SERVED
    try:
        return msgspec.json.decode(path.read_bytes(), type=Training)
    except (OSError, msgspec.DecodeError):
        return None


def _bare(row: Row) -> Row:
    return replace(row, figures={})


def _newest_of_lines(rows: Sequence[Row]) -> list[Row]:
    """All rows of the newest step of the newest line: boards may have got them, or not."""
    drawn = [row for row in rows if row.kind != "rollback"]
    if not drawn:
        return []
    line = max(row.line for row in drawn)
    step = max(row.step for row in drawn if row.line == line)
    return [row for row in drawn if (row.line, row.step) == (line, step)]


def _append(handle: int, line: bytes) -> None:
    """Whole or not at all: a full disk takes a part of it first, and says so at the next write."""
    before = os.fstat(handle).st_size
    written = os.write(handle, line)
    if written < len(line):
        os.ftruncate(handle, before)
        raise OSError(errno.ENOSPC, f"{written} of {len(line)} bytes of a row were written")


def _cut_torn_end(path: Path) -> None:
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with path.open("r+b") as file:
            file.truncate(whole)
            os.fsync(file.fileno())
