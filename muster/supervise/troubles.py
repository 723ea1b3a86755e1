"""What holds up services that run, as their logs tell it.

Owns: telling people what a service waits for (room on a disk, Redis, the bank), so that they need
not look into its log, and that it is over. Promise: only what goes on is told, and once; reading is
bounded. Does not cover: the wait itself (muster/patience.py), why a process ended (logs.py).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from muster.telemetry import printable

_READ_BYTES_MAX = 65_536
_TEXT_CHARACTERS_MAX = 600
_LOOKS_OVER = 3  # without a word, until it is taken to be over: a try may outlast a look
_WAIT = re.compile(r", trying again in [\d.]+ s")


@dataclass
class _Service:
    read: int  # bytes of its log
    looks: int = 0  # in a row in which it was held up
    silent: int = 0  # in a row since
    told: str = ""


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
        text = self._newest(one, log)
        if not text:
            one.silent += 1
            if one.silent < _LOOKS_OVER:
                return None
            one.looks, told, one.told = 0, one.told, ""
            return "" if told else None
        one.looks, one.silent = one.looks + 1, 0
        if one.looks < 2 or text == one.told:
            return None
        one.told = text
        return text

    def _newest(self, one: _Service, log: Path) -> str:
        """The newest wait that was written since the last look."""
        size = _size(log)
        begin = max(one.read if one.read <= size else 0, size - _READ_BYTES_MAX)
        one.read = size
        try:
            with log.open("rb") as file:
                file.seek(begin)
                lines = file.read(size - begin).decode("utf-8", "replace").split("\n")
        except OSError:
            return ""
        return next((text for line in reversed(lines) if (text := _wait(line))), "")


def _size(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return 0


def _wait(line: str) -> str:
    if '"patience"' not in line:
        return ""
    try:
        record = json.loads(line)
    except ValueError:
        return ""
    if not isinstance(record, dict) or record.get("logger") != "patience":
        return ""
    text = _WAIT.sub("", printable(str(record.get("text", ""))))
    return text[:_TEXT_CHARACTERS_MAX]
