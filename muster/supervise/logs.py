"""The log file of each service: bounded in size, and asked why a service died."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from muster.telemetry import printable
from muster.types import Value

_TAIL_BYTES = 65_536
_LINE_CHARACTERS_MAX = 2000
_KILLED = 128 + 9  # the status of a process that SIGKILL ended


def rotate(path: Path, limit_bytes: int) -> None:
    """Keep one former file beside a new, empty one, once `path` is over the limit.

    The writers have it open for appending, so its content is copied and the file is emptied; lines
    written between the two are lost. Where there is no room for a copy all is left as it is.
    """
    if not path.exists() or path.stat().st_size <= limit_bytes:
        return
    fresh, former = path.with_suffix(".log.new"), path.with_suffix(".log.1")
    try:
        if shutil.disk_usage(path.parent).free < 2 * path.stat().st_size:
            return  # what little room there is, others need
        shutil.copyfile(path, fresh)
        fresh.replace(former)
    except OSError:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        return
    with path.open("r+b") as file:
        file.truncate()


def last_words(path: Path, start: int, status: int) -> str:
    """The line that best says why the process ended; `start` is where its own output begins.

    A status of 2 comes with a line for people that begins with the service's name, given as it
    stands; else the newest error, else the last line, with its number in the log. Who was killed
    could say nothing.
    """
    if status == _KILLED:
        return "it was killed (by SIGKILL: somebody, or the kernel for want of memory)"
    lines = list(_lines(path, start))
    plain = [line for line in lines if not line.text.startswith("{")]
    role = re.sub(r"-\d+$", "", path.stem)  # router-2 speaks as router
    own = [line for line in plain if line.text.startswith(f"{role}: ")]
    if status == 2 and plain:
        return (own or plain)[-1].text
    records = [(line, record) for line in lines if (record := _record(line.text))]
    told = [_Line(line.number, str(record["text"])) for line, record in records]
    errors = [
        found
        for found, (_, record) in zip(told, records, strict=True)
        if record.get("level") in ("ERROR", "CRITICAL")
    ]
    for found in (plain, errors, told):
        if found:
            text = printable(found[-1].text)[:_LINE_CHARACTERS_MAX]
            return f"{text} (line {found[-1].number} of logs/{path.name})"
    return "it left no word in its log"


class _Line(Value, frozen=True):
    number: int
    text: str


def _lines(path: Path, start: int) -> Iterator[_Line]:
    """Lines with words in them, of the file's last part."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            begin = start if start <= size else 0  # the file was rotated meanwhile
            file.seek(0)
            before = file.read(max(begin, size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return
    first = before.count(b"\n") + 1
    for number, line in enumerate(text.split("\n"), first):
        # Tracebacks of exception groups are drawn as a tree: its branches are no words.
        if words := printable(line).strip(" |+-\t\r"):
            yield _Line(number, words)


def _record(line: str) -> dict[str, object] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "text" in found else None
