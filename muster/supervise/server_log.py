"""What the embedded server's log says about its append-only file.

Owns: the sentences of the server that people must hear, and what to do then. Promise: a start with
a torn end is told; a file that cannot be read ends everything at once, with the command that
mends it. Does not cover: other reasons why it may end (logs.py).
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

_READ_BYTES_MAX = 1 << 20
_TORN = "loaded anyway because aof-load-truncated is enabled"
_BROKEN = re.compile(
    r"(?:Bad file format|Unexpected end of file|Unrecoverable error) reading the append only file "
    r"([\w.-]+\.(?:aof|rdb))"
)
_FULL = "Can't recover from AOF write error"
_FREE_BYTES_MIN = 1 << 16
TORN = (
    "the last write in its append-only file was torn (a power cut, or a full disk) and is dropped; "
    "whoever was answered has lost it, unless redis.appendfsync is always"
)


def remark(log: Path, start: int) -> str:
    """What to tell about a start that went well, mostly nothing."""
    return TORN if _TORN in _said(log, start) else ""


def verdict(log: Path, start: int, *, data: Path, server: str) -> str:
    """The line for people when another start would end the same way, else "".

    `data`: the server's folder; `server`: its binary.
    """
    said = _said(log, start)
    if _FULL in said or _free_bytes(data) < _FREE_BYTES_MIN:  # then its last words are lost too
        return (
            f"redis: {data}: the append-only file cannot be written, and then the server stops "
            "(at once where redis.appendfsync = 'always') → free space on that disk, start again"
        )
    if broken := _BROKEN.search(said):
        file = data / "appendonlydir" / broken[1]
        tool = "valkey-check-rdb" if file.suffix == ".rdb" else "valkey-check-aof --fix"
        return (
            f"redis: {data}: the append-only file is damaged in the middle, so the server will not "
            "read it → copy the folder aside; then cut the file where the damage begins (what was "
            f"written after is lost): {_as(tool, server)} {shlex.quote(str(file))})"
        )
    return ""


def _as(tool: str, server: str) -> str:
    """The command that runs the server's binary as one of the tools that it is too."""
    name, _, options = tool.partition(" ")
    return f"(exec -a {name} {shlex.quote(server)} {options}".rstrip()


def _free_bytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return _FREE_BYTES_MIN


def _said(log: Path, start: int) -> str:
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(start if start <= size else 0, size - _READ_BYTES_MAX))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
