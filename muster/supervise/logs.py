"""The log file of each service: bounded in size, and asked why a service died."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from muster.telemetry import printable

_TAIL_BYTES = 65_536
_LINE_CHARACTERS_MAX = 2000
_KILLED = 128 + 9  # the status of a process that SIGKILL ended


def rotate(path: Path, limit_bytes: int) -> None:
    """Keep one former file beside a new, empty one, once `path` is over the limit.

    The writers have it open for appending, so its content is copied and the file is emptied; lines
    written between the two are lost.
    """
    if path.exists() and path.stat().st_size > limit_bytes:
        shutil.copyfile(path, path.with_suffix(".log.1"))
        with path.open("r+b") as file:
            file.truncate()


def last_words(path: Path, start: int, status: int) -> str:
    """The line that best says why the process ended; `start` is where its own output begins.

    A status of 2 comes with a line for people that begins with the service's name; else the newest
    error, else the last line. Who was killed could say nothing.
    """
    if status == _KILLED:
        return "it was killed (by SIGKILL: somebody, or the kernel for want of memory)"
    lines = _lines(path, start)
    plain = [line for line in lines if not line.startswith("{")]
    own = [line for line in plain if line.startswith(f"{path.stem}: ")]
    if status == 2 and plain:
        return (own or plain)[-1]
    records = [record for line in lines if (record := _record(line))]
    errors = [r["text"] for r in records if r.get("level") in ("ERROR", "CRITICAL")]
    for found in (plain, errors, [str(r["text"]) for r in records]):
        if found:
            return printable(str(found[-1]))[:_LINE_CHARACTERS_MAX]
    return "it left no word in its log"


def _lines(path: Path, start: int) -> list[str]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            begin = start if start <= size else 0  # the file was rotated meanwhile
            file.seek(max(begin, size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    # Tracebacks of exception groups are drawn as a tree: its branches are no words.
    lines = (printable(line).strip(" |+-\t") for line in text.splitlines())
    return [line for line in lines if line]


def _record(line: str) -> dict[str, object] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "text" in found else None
