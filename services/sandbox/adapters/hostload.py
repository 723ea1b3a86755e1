"""How busy this machine is, as its kernel tells.

Promise: a figure that cannot be read is 0, never an error. Does not cover: what boxes use.
"""

from __future__ import annotations

import os
from pathlib import Path

from muster.types import Value


class HostLoad(Value, frozen=True):
    """Load over 1, 5 and 15 minutes; processors that this process may use; bytes."""

    load: tuple[float, ...]
    processors: int
    memory_total: int
    memory_available: int


def read(proc: Path = Path("/proc")) -> HostLoad:
    """The figures of now."""
    load = tuple(float(word) for word in _text(proc / "loadavg").split()[:3])
    memory = dict.fromkeys(("MemTotal", "MemAvailable"), 0)
    for line in _text(proc / "meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name in memory:
            memory[name] = int(rest.split()[0]) * 1024
    processors = len(os.sched_getaffinity(0))
    return HostLoad(load, processors, memory["MemTotal"], memory["MemAvailable"])


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii")
    except OSError:
        return ""
