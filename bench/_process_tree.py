"""Processor time of a process and all below it.

Promise: reads /proc alone; a process that goes meanwhile is counted as far as its parent has waited
for it. Does not cover: processes that have left the tree (the keepers of boxes do).
"""

from __future__ import annotations

import os
from pathlib import Path

_PARENT, _FIRST = 1, 11  # fields after the name: ppid; utime, stime, cutime, cstime


def cpu_s(root: int, proc: Path = Path("/proc")) -> float:
    """Seconds of `root`, of what runs below it, and of what has ended there and was waited for."""
    parents: dict[int, int] = {}
    spent: dict[int, int] = {}
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_text("utf-8", "replace")
        except OSError:
            continue  # it has gone
        fields = text[text.rindex(")") + 2 :].split()
        parents[int(entry.name)] = int(fields[_PARENT])
        spent[int(entry.name)] = sum(map(int, fields[_FIRST : _FIRST + 4]))
    total = sum(spent[pid] for pid in spent if _below(pid, root, parents))
    return total / os.sysconf("SC_CLK_TCK")


def _below(pid: int, root: int, parents: dict[int, int]) -> bool:
    seen = set[int]()
    while pid != root:
        if pid in seen or pid not in parents:
            return False
        seen.add(pid)
        pid = parents[pid]
    return True
