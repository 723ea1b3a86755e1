"""A machine at one moment: all processes, mounts, cgroups, temporary files, shared memory.

Promise: whatever is there afterwards and was not before shows up in `added`, whoever made it; so
run it on a machine where nothing else starts and ends. Kernel threads are left out.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_FOLDERS = {"/tmp": 1, "/var/tmp": 1, "/dev/shm": 1, "/run": 2}
_KERNEL = 2  # pid of kthreadd; its children are threads of the kernel


@dataclass(frozen=True)
class Snapshot:
    """Kind → what there is of it."""

    things: dict[str, frozenset[str]]

    def added(self, before: Snapshot) -> dict[str, list[str]]:
        """What is new since `before`, by kind; empty when nothing is."""
        found = {
            kind: sorted(now - before.things.get(kind, frozenset()))
            for kind, now in self.things.items()
        }
        return {kind: new for kind, new in found.items() if new}


def take(own: int | None = None) -> Snapshot:
    """The machine now, without the process `own` (default: this one) and its descendants."""
    return Snapshot(
        {
            "processes": frozenset(_processes(own or os.getpid())),
            "mounts": frozenset(_mounts("self")),
            "mounts of process 1": frozenset(_mounts("1")),
            "cgroups": frozenset(_cgroups()),
            "files": frozenset(path for root in _FOLDERS for path in _files(root)),
        }
    )


def _processes(own: int) -> list[str]:
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            head, _, tail = Path(f"/proc/{entry}/stat").read_text().rpartition(")")
            command = Path(f"/proc/{entry}/cmdline").read_text().replace("\0", " ").strip()
        except OSError:
            continue  # it ended while we looked
        fields = tail.split()
        parents[int(entry)] = int(fields[1])
        what = command or head.partition("(")[2]
        names[int(entry)] = f"{entry} started at {fields[19]}: {what}"
    return [
        name
        for pid, name in names.items()
        if own not in (lineage := _lineage(pid, parents)) and _KERNEL not in lineage
    ]


def _lineage(pid: int, parents: dict[int, int]) -> list[int]:
    line = [pid]
    while line[-1] in parents and len(line) < 100:
        line.append(parents[line[-1]])
    return line


def _mounts(who: str) -> list[str]:
    """Place, kind, source and options; not the ids, which are only ordinals."""
    try:
        lines = Path(f"/proc/{who}/mountinfo").read_text().splitlines()
    except PermissionError:
        return []
    found = []
    for line in lines:
        left, _, right = line.partition(" - ")
        found.append(f"{left.split()[4]} {left.split()[3]} {right}")
    return found


def _cgroups() -> list[str]:
    roots = set()
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if right.split()[0] in ("cgroup", "cgroup2"):
            roots.add(left.split()[4])
    return [folder for root in roots for folder, _, _ in os.walk(root)]


def _files(root: str, depth: int = 0) -> list[str]:
    depth = depth or _FOLDERS[root]
    found = []
    try:
        entries = list(os.scandir(root))
    except OSError:
        return []
    for entry in entries:
        found.append(entry.path)
        if depth > 1 and entry.is_dir(follow_symlinks=False):
            found += _files(entry.path, depth - 1)
    return found
