"""What the kernel counted for a container, read from its control groups on this machine.

Promise: figures come from files that no process of the container can write; where the groups of
the engine do not show here (an engine on another machine, /sys/fs/cgroup not mounted into the
service), they are UNKNOWN and nothing is made up. Does not cover: limits (the engine sets them).
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from muster.types import Value
from services.sandbox.adapters.native import pressure

_ROOT = Path("/sys/fs/cgroup")


class Counts(Value, frozen=True):
    """Totals since the container began; seconds. processes: alive now, -1 when not told."""

    oom_kills: int = 0
    pids_refused: int = 0
    cpu_s: float = 0.0
    cpu_stall_s: float = pressure.UNTOLD
    memory_stall_s: float = pressure.UNTOLD
    io_stall_s: float = pressure.UNTOLD
    processes: int = -1

    def since(self, before: Counts) -> Counts:
        """What came since; no stall where either is not told."""
        stalls = {
            name: max(0.0, getattr(self, name) - getattr(before, name))
            if min(getattr(self, name), getattr(before, name)) >= 0
            else pressure.UNTOLD
            for name in ("cpu_stall_s", "memory_stall_s", "io_stall_s")
        }
        return msgspec.structs.replace(
            self,
            oom_kills=max(0, self.oom_kills - before.oom_kills),
            pids_refused=max(0, self.pids_refused - before.pids_refused),
            cpu_s=max(0.0, self.cpu_s - before.cpu_s),
            **stalls,
        )


class Groups:
    """The groups of one container; none of them need exist."""

    def __init__(self, container: str = "", root: Path = _ROOT):
        v2 = root if (root / "cgroup.controllers").exists() else root / "unified"
        self._v2 = _find(v2, container)
        self._memory = _find(root / "memory", container) or self._v2
        self._pids = _find(root / "pids", container) or self._v2
        self._cpu = _find(root / "cpuacct", container) or _find(root / "cpu,cpuacct", container)

    @property
    def shown(self) -> bool:
        """Whether they can be read here."""
        return self._memory is not None and self._pids is not None

    @property
    def tell_stall(self) -> bool:
        return self._v2 is not None and pressure.told(str(self._v2))

    def read(self) -> Counts:
        """Now; zeroes where a group is not shown or has gone."""
        return Counts(
            _word(self._memory, ("memory.events", "memory.oom_control"), "oom_kill"),
            _word(self._pids, ("pids.events",), "max"),
            self._cpu_s(),
            **pressure.stalls(self._opened),
            processes=self._processes(),
        )

    def _cpu_s(self) -> float:
        if self._cpu is not None:
            return _number(self._cpu / "cpuacct.usage") / 1e9
        return _word(self._v2, ("cpu.stat",), "usage_usec") / 1e6

    def _processes(self) -> int:
        try:
            return len((self._pids / "cgroup.procs").read_text().split()) if self._pids else -1
        except OSError:
            return -1

    def _opened(self, name: str) -> int:
        if self._v2 is None:
            raise FileNotFoundError(name)
        return os.open(self._v2 / name, os.O_RDONLY | os.O_CLOEXEC)


def _find(root: Path, container: str) -> Path | None:
    """Where the engine puts its groups, with either of its drivers."""
    if not container:
        return None
    for name in (f"docker/{container}", f"system.slice/docker-{container}.scope"):
        if (root / name).is_dir():
            return root / name
    return None


def _word(folder: Path | None, files: tuple[str, ...], key: str) -> int:
    for name in files:
        for line in _lines(folder, name):
            words = line.split()
            if len(words) == 2 and words[0] == key and words[1].isdecimal():
                return int(words[1])
    return 0


def _lines(folder: Path | None, name: str) -> list[str]:
    if folder is None:
        return []
    try:
        return (folder / name).read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int:
    lines = _lines(path.parent, path.name)
    return int(lines[0]) if lines and lines[0].isdecimal() else 0
