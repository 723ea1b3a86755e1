"""What holds up services that run, as their logs tell it.

Owns: telling people what a service waits for (room on a disk, Redis, the bank), so that they need
not look into its log, and that it is over. Promise: told is what is awaited at two looks, once, the
longest wait first; reading is bounded. Does not cover: the wait itself (muster/patience.py writes
both ends of it into the log), why a process ended (logs.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muster.telemetry import printable

_READ_BYTES_MAX = 65_536
_TEXT_CHARACTERS_MAX = 600
_SILENT_LOOKS_MAX = 60  # then it is over, and its end was written where nobody read


_Key = tuple[str, str]  # what is awaited, number of the wait


@dataclass
class _Wait:
    text: str
    looks: int = 0  # that found it going on
    silent: int = 0  # looks in a row without a word of it


@dataclass
class _Service:
    read: int  # bytes of its log
    waits: dict[_Key, _Wait] = field(default_factory=dict)  # the longest first
    told: str = ""  # what is awaited that people know of


class Troubles:
    """Of all services of one supervisor; `look` at each every few seconds."""

    def __init__(self) -> None:
        self._services: dict[str, _Service] = {}

    def started(self, name: str, log: Path) -> None:
        """A new process: what was written before it is not its own."""
        self._services[name] = _Service(_size(log))

    def look(self, name: str, log: Path) -> str | None:
        """What to tell of it now; empty when its trouble is over, None when there is no news."""
        one = self._services[name]
        for wait in one.waits.values():
            wait.silent += 1
        back = set[str]()
        for key, text, over in _words(one, log):
            if over is None:
                wait = one.waits.setdefault(key, _Wait(text))
                wait.text, wait.silent = text, 0
                continue
            one.waits.pop(key, None)
            if over:
                back.add(key[0])
        one.waits = {k: w for k, w in one.waits.items() if w.silent <= _SILENT_LOOKS_MAX}
        for wait in one.waits.values():
            wait.looks += 1
        held = {key[0]: wait.text for key, wait in one.waits.items() if wait.looks > 1}
        if one.told in held or (not held and not one.told):
            return None
        before, one.told = one.told, next(iter(held), "")
        if held:
            return held[one.told]
        return "" if before in back else None  # who gave up or was cut off does not go on


def _words(one: _Service, log: Path) -> Iterator[tuple[_Key, str, bool | None]]:
    """Who waits for what, and how that is said; at its end whether it came back. Since the last
    look, in order."""
    size = _size(log)
    begin = max(one.read if one.read <= size else 0, size - _READ_BYTES_MAX)
    one.read = size
    try:
        with log.open("rb") as file:
            file.seek(begin)
            lines = file.read(size - begin).decode("utf-8", "replace").split("\n")
    except OSError:
        return
    for line in lines:
        record = _record(line)
        what = str(record.get("awaited") or "")
        if what:
            text = printable(str(record.get("text", "")))[:_TEXT_CHARACTERS_MAX]
            over = record.get("over")
            yield (what, str(record.get("wait"))), text, None if over is None else bool(over)


def _size(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return 0


def _record(line: str) -> dict[str, Any]:
    if '"awaited"' not in line:
        return {}
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
