"""How long the processes of a group waited for what they could not get: pressure stall, "some".

Promise: seconds since the group was made, for processor, memory and disk; -1 where this kernel does
not tell. A whole host's figure is never taken instead: it would excuse a command that sleeps on a
busy host; nor does what a box's own processor limit held back count as stall. The files are in
every group of the v2 hierarchy, whichever hierarchy has the controllers
(Documentation/accounting/psi.rst). Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Callable

UNTOLD = -1.0
KINDS = ("cpu", "memory", "io")
_THROTTLED = {"throttled_usec": 1e6, "throttled_time": 1e9}  # v2; v1


def stalls(opened: Callable[[str], int]) -> dict[str, float]:
    """`cpu_stall_s`, `memory_stall_s`, `io_stall_s` of one group; `opened` opens a file of it."""
    return {f"{kind}_stall_s": _stall(opened, f"{kind}.pressure") for kind in KINDS}


def told(directory: str) -> bool:
    """Whether this kernel tells it for the groups below `directory`."""
    found = stalls(lambda name: os.open(os.path.join(directory, name), os.O_RDONLY | os.O_CLOEXEC))
    return found["cpu_stall_s"] >= 0


def throttled(text: str) -> float:
    """Seconds that a processor limit held processes back, from a group's cpu.stat, v2 or v1.

    Summed over processors: where two of them were held back at a time, both count. Raises
    ValueError for anything else.
    """
    for line in text.splitlines():
        name, _, figure = line.partition(" ")
        if name in _THROTTLED:
            return int(figure) / _THROTTLED[name]
    raise ValueError("no line for throttled time")


def without(stalls: dict[str, float], held_back_s: float) -> dict[str, float]:
    """The same without the box's own processor limit: that is none of the host's doing.

    The kernel counts a process that its limit holds back as one that waits for a processor. What
    the limit may explain is not told as stall, so that no command is excused by its own limit.
    """
    cpu = stalls["cpu_stall_s"]
    return stalls | {"cpu_stall_s": max(0.0, cpu - held_back_s) if cpu >= 0 else cpu}


def _stall(opened: Callable[[str], int], name: str) -> float:
    try:
        with open(opened(name), encoding="ascii") as file:
            return some(file.read())
    except (OSError, ValueError):
        return UNTOLD


def some(text: str) -> float:
    """Seconds, from a pressure file: `some avg10=0.00 avg60=0.00 avg300=0.00 total=MICROSECONDS`.

    Raises ValueError for anything else.
    """
    for line in text.splitlines():
        kind, *figures = line.split()
        if kind == "some":
            fields = dict(figure.split("=", 1) for figure in figures)
            return int(fields.get("total", "")) / 1e6
    raise ValueError("no line for `some`")
