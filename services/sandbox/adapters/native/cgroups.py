"""Control groups, whichever way this host has them: v2, v1 or both.

Owns: where the groups of this instance lie, and their limits, kills, counters and removal.
Promise: all of them lie below directories named `muster-<instance>`, so that a sweep finds what a
killed predecessor left. Killing and freezing go through v2 (`cgroup.kill`, `cgroup.freeze`).
Limits go through whichever hierarchy has the controller (hierarchies.py); a processor limit only
where one is there and handed down to us. Standard library only; runs in the keeper and in the
host check.

    <v2>/muster-I/<box>/init        PID 1 of the box: never limited, so that it can always act
    <v2>/muster-I/<box>/agent/tN    the processes of step N (killed at its time limit)
    <memory>/muster-I/<box>/agent   limits and counters; the same directory on a pure v2 host
    <cpu>/muster-I/<box>/agent      in v1 only for a box that has a processor limit
"""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass

from services.sandbox.adapters.native.hierarchies import (
    NO_CPU,
    OPTIONAL,
    CgroupTrouble,
    Hierarchies,
    Place,
    discover,
    find,
)

__all__ = ["BoxGroups", "CgroupTrouble", "Tree", "discover", "find", "kill_all", "remove_tree"]

_FAR = 5.0  # seconds that killed processes may take to end; they are gone in milliseconds
_PERIOD_US = 100_000  # the kernel's own choice; a box gets its share of each


class Tree:
    """The subtree of one instance."""

    def __init__(self, instance: str, found: Hierarchies):
        self._name = f"muster-{instance}"
        self._found = found
        places = [*found.all, *([found.cpu] if found.cpu else [])]
        self._roots = {place: self._root(place) for place in places}
        self._limits_cpu = False

    def _root(self, place: Place) -> str:
        return os.path.join(place.directory, self._name)

    @property
    def roots(self) -> list[str]:
        """Recorded, so that a successor with another place finds them."""
        return list(self._roots.values())

    @property
    def kill_root(self) -> str:
        """Ours in the v2 hierarchy."""
        return self._roots[self._found.kill]

    @property
    def limits_cpu(self) -> bool:
        """Whether a box may have a processor limit; known after `create`."""
        return self._limits_cpu

    def create(self) -> None:
        """Make the subtree; raises CgroupTrouble when the host does not let us."""
        for place in self._found.all:
            wanted = self._v2_controllers(place)
            try:
                _enable(place.directory, wanted)
            except OSError:
                # Processes beside us: no controllers here. The hierarchy's own root allows it.
                self._roots[place] = os.path.join(place.mountpoint, self._name)
                self._enable_at_top(place, wanted)
            root = self._roots[place]
            try:
                os.makedirs(root, exist_ok=True)
                _enable(root, wanted)
            except OSError as error:
                raise CgroupTrouble(f"cannot make {root}: {error.strerror}", _DELEGATE) from error
        kill = self._roots[self._found.kill]
        if not os.path.exists(os.path.join(kill, "cgroup.kill")):
            raise CgroupTrouble(
                "this kernel has no cgroup.kill", "use Linux 5.14 or newer (uname -r shows yours)"
            )
        self._limits_cpu = self._hand_down_cpu()

    def _hand_down_cpu(self) -> bool:
        place = self._found.cpu
        if place is None:
            return False
        root = self._roots[place]
        try:
            os.makedirs(root, exist_ok=True)
            if place.v2:
                _enable(os.path.dirname(root), [OPTIONAL])
                _enable(root, [OPTIONAL])
        except OSError:
            return False  # delegated without it: boxes that want it are refused, others run
        return True

    def _v2_controllers(self, place: Place) -> list[str]:
        if not place.v2:
            return []
        pairs = (("memory", self._found.memory), ("pids", self._found.pids))
        return [name for name, where in pairs if where == place]

    def _enable_at_top(self, place: Place, wanted: list[str]) -> None:
        try:
            _enable(place.mountpoint, wanted)
        except OSError as error:
            raise CgroupTrouble(
                f"cannot hand {', '.join(wanted)} down from {place.mountpoint}: {error.strerror}",
                _DELEGATE,
            ) from error

    def groups(self, box: str) -> BoxGroups:
        """Where the groups of a box are, whether they exist or not."""
        cpu = self._found.cpu if self._limits_cpu else None
        return BoxGroups(
            os.path.join(self._roots[self._found.kill], box),
            os.path.join(self._roots[self._found.memory], box),
            os.path.join(self._roots[self._found.pids], box),
            self._found.memory.v2,
            self._found.pids.v2,
            os.path.join(self._roots[cpu], box) if cpu else "",
            cpu is not None and cpu.v2,
        )

    def add_box(self, box: str, memory_bytes: int, pids: int, cpus: float = 0.0) -> None:
        """Make the groups of one box; 0 leaves that limit out. cpus: processors at a time.

        Raises CgroupTrouble for a processor limit that this host cannot set.
        """
        groups = self.groups(box)
        if cpus and not groups.cpu:
            raise CgroupTrouble(*NO_CPU)
        for place in self._found.all:
            root = self._roots[place]
            os.makedirs(os.path.join(root, box, "agent"), exist_ok=True)
            _enable(os.path.join(root, box), self._v2_controllers(place))
        os.makedirs(os.path.join(groups.kill, "init"), exist_ok=True)
        groups.limit(memory_bytes, pids)
        if cpus:
            groups.limit_cpu(cpus)

    def sweep(self, recorded: list[str]) -> int:
        """Kill and remove everything below our roots and the recorded ones; how many groups."""
        count = 0
        for root in dict.fromkeys([*self.roots, *recorded]):
            if os.path.basename(root) == self._name and os.path.isdir(root):
                kill_all(root)
                count += remove_tree(root)
        return count


@dataclass(frozen=True)
class BoxGroups:
    """The directories of one box, by what they are for."""

    kill: str
    memory: str
    pids: str
    memory_v2: bool
    pids_v2: bool
    cpu: str = ""  # empty: no processor limit is possible here
    cpu_v2: bool = False

    def limit(self, memory_bytes: int, pids: int) -> None:
        """Set the limits on the agent's processes."""
        agent = os.path.join(self.memory, "agent")
        if memory_bytes and self.memory_v2:
            _write(os.path.join(agent, "memory.max"), str(memory_bytes))
            _write_if_there(os.path.join(agent, "memory.swap.max"), "0")
        elif memory_bytes:
            _write(os.path.join(agent, "memory.limit_in_bytes"), str(memory_bytes))
            _write_if_there(os.path.join(agent, "memory.memsw.limit_in_bytes"), str(memory_bytes))
        if pids:
            _write(os.path.join(self.pids, "agent", "pids.max"), str(pids))

    def limit_cpu(self, cpus: float) -> None:
        """Set how many processors the agent's processes get at a time, all together."""
        quota = max(1000, round(cpus * _PERIOD_US))  # the kernel takes no less than 1 ms
        agent = os.path.join(self.cpu, "agent")
        os.makedirs(agent, exist_ok=True)
        try:
            if self.cpu_v2:
                _enable(self.cpu, [OPTIONAL])
                _write(os.path.join(agent, "cpu.max"), f"{quota} {_PERIOD_US}")
            else:
                _write(os.path.join(agent, "cpu.cfs_period_us"), str(_PERIOD_US))
                _write(os.path.join(agent, "cpu.cfs_quota_us"), str(quota))
        except OSError as error:
            raise CgroupTrouble(
                f"cannot limit a box to {cpus:g} processors: {error.strerror}",
                "ask for fewer: this service itself may be limited to less "
                f"(see cpu.max or cpu.cfs_quota_us above {self.cpu})",
            ) from error

    @property
    def joins(self) -> list[str]:
        """`cgroup.procs` files that a step enters beside its own v2 leaf."""
        places = [(self.memory, self.memory_v2), (self.pids, self.pids_v2)]
        if self.cpu and os.path.isdir(os.path.join(self.cpu, "agent")):
            places.append((self.cpu, self.cpu_v2))
        distinct = dict.fromkeys(path for path, v2 in places if not v2)
        return [os.path.join(path, "agent", "cgroup.procs") for path in distinct]

    @property
    def throttle_counter(self) -> str:
        """Where the kernel counts what the processor limit held back; empty without a limit."""
        path = os.path.join(self.cpu, "agent", "cpu.stat") if self.cpu else ""
        return path if os.path.exists(path) else ""

    @property
    def oom_counter(self) -> str:
        name = "memory.events" if self.memory_v2 else "memory.oom_control"
        return os.path.join(self.memory, "agent", name)

    @property
    def pids_counter(self) -> str:
        return os.path.join(self.pids, "agent", "pids.events")

    def freeze(self, wait_s: float) -> bool:
        """Stop the agent's processes where they are; False when some run on after `wait_s`.

        Ends with `thaw`, in either case.
        """
        agent = os.path.join(self.kill, "agent")
        _write(os.path.join(agent, "cgroup.freeze"), "1")
        deadline = time.monotonic() + wait_s
        while "frozen 1" not in _text(os.path.join(agent, "cgroup.events")):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0005)
        return True

    def thaw(self) -> None:
        """Let them go on."""
        _write(os.path.join(self.kill, "agent", "cgroup.freeze"), "0")

    def kill_left(self, wait_s: float) -> bool:
        """SIGKILL what is left of the box; False when something lives on after `wait_s`."""
        try:
            kill_all(self.kill, wait_s)
        except TimeoutError:
            return False
        return True

    def remove(self, wait_s: float) -> bool:
        """Remove the directories of an ended box; False when the kernel still holds one."""
        try:
            for directory in dict.fromkeys((self.kill, self.memory, self.pids, self.cpu)):
                if directory:
                    remove_tree(directory, wait_s)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            return False
        return True


def kill_all(directory: str, wait_s: float = _FAR) -> None:
    """SIGKILL every process below `directory` and wait until none is left; TimeoutError."""
    _write_if_there(os.path.join(directory, "cgroup.kill"), "1")
    deadline = time.monotonic() + wait_s
    while pids := _pids_below(directory):
        if not os.path.exists(os.path.join(directory, "cgroup.kill")):
            for pid in pids:  # a v1 directory: no kill file, one by one
                _kill(pid)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(pids)} processes in {directory} did not end")
        time.sleep(0.001)


def remove_tree(directory: str, wait_s: float = _FAR) -> int:
    """Remove empty groups from the bottom up; how many were removed. OSError after `wait_s`."""
    count = 0
    for path, _, _ in os.walk(directory, topdown=False):
        deadline = time.monotonic() + wait_s
        while True:
            try:
                os.rmdir(path)
                count += 1
                break
            except FileNotFoundError:
                break
            except OSError:  # just emptied: the kernel needs a moment
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.001)
    return count


def _pids_below(directory: str) -> list[int]:
    pids: list[int] = []
    for path, _, _ in os.walk(directory):
        try:
            pids += [int(line) for line in _text(os.path.join(path, "cgroup.procs")).split()]
        except OSError:
            continue  # removed while we walked
    return pids


def _kill(pid: int) -> None:
    try:
        os.kill(pid, 9)
    except ProcessLookupError:
        return


def _enable(directory: str, controllers: list[str]) -> None:
    if controllers:
        wanted = " ".join(f"+{name}" for name in controllers)
        _write(os.path.join(directory, "cgroup.subtree_control"), wanted)


def _write(path: str, text: str) -> None:
    handle = os.open(path, os.O_WRONLY)
    try:
        os.write(handle, text.encode())
    finally:
        os.close(handle)


def _write_if_there(path: str, text: str) -> None:
    try:
        _write(path, text)
    except OSError:
        return


def _text(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


_DELEGATE = (
    "run as root in a cgroup of its own: systemd-run -p Delegate=yes, "
    "or docker run --cgroupns=host -v /sys/fs/cgroup:/sys/fs/cgroup:rw"
)
