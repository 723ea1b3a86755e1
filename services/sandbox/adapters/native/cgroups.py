"""Control groups, whichever way this host has them: v2, v1 or both.

Owns: where the groups of this instance lie, and their limits, kills, counters and removal.
Promise: all of them lie below directories named `muster-<instance>`, so that a sweep finds what a
killed predecessor left. Killing goes through v2 (`cgroup.kill`), limits through whichever
hierarchy has the controller. Standard library only; runs in the keeper and in the host check.

    <v2>/muster-I/<box>/init        PID 1 of the box: never limited, so that it can always act
    <v2>/muster-I/<box>/agent/tN    the processes of step N (killed at its time limit)
    <memory>/muster-I/<box>/agent   limits and counters; the same directory on a pure v2 host
"""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass

_FAR = 5.0  # seconds that killed processes may take to end; they are gone in milliseconds
CONTROLLERS = ("memory", "pids")


class CgroupTrouble(Exception):
    """What is missing, and the way out."""

    def __init__(self, problem: str, way_out: str):
        super().__init__(problem)
        self.problem, self.way_out = problem, way_out


@dataclass(frozen=True)
class Place:
    """One hierarchy: the directory that our subtree is made in, and where it is mounted."""

    directory: str
    mountpoint: str
    v2: bool


@dataclass(frozen=True)
class Hierarchies:
    """Where to kill, and where each controller is."""

    kill: Place
    memory: Place
    pids: Place

    @property
    def all(self) -> list[Place]:
        return list(dict.fromkeys((self.kill, self.memory, self.pids)))


def find(mountinfo: str, own: str, v2_controllers: str) -> Hierarchies:
    """From the texts of /proc/self/mountinfo, /proc/self/cgroup and v2 `cgroup.controllers`.

    Pure. Raises CgroupTrouble when killing or a limit is not possible.
    """
    places = _places(mountinfo, _own_paths(own))
    if "" not in places:
        raise CgroupTrouble(
            "no cgroup2 hierarchy is mounted, so a step's processes could not be killed as a whole",
            "mount -t cgroup2 none /sys/fs/cgroup/unified",
        )
    for name in CONTROLLERS:
        if name not in places and name in v2_controllers.split():
            places[name] = places[""]
        if name not in places:
            raise CgroupTrouble(
                f"the {name} controller is in no mounted cgroup hierarchy",
                f"boot without cgroup_disable={name}, or mount it: "
                f"mount -t cgroup -o {name} none /sys/fs/cgroup/{name}",
            )
    return Hierarchies(places[""], places["memory"], places["pids"])


def _own_paths(own: str) -> dict[str, str]:
    """Controller (v2: "") → path of this process."""
    paths: dict[str, str] = {}
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(","):
            paths[name] = path
    return paths


def _places(mountinfo: str, paths: dict[str, str]) -> dict[str, Place]:
    places: dict[str, Place] = {}
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, (kind, _, options) = left.split(), right.split(" ", 2)
        if kind not in ("cgroup", "cgroup2"):
            continue
        root, mountpoint = fields[3], fields[4]
        v2 = kind == "cgroup2"
        for name in [""] if v2 else [n for n in options.split(",") if n in CONTROLLERS]:
            path = paths.get(name, "/")
            below = path.removeprefix(root.rstrip("/")).strip("/") if path.startswith(root) else ""
            directory = os.path.join(mountpoint, below) if below else mountpoint
            places.setdefault(name, Place(directory, mountpoint, v2))
    return places


def discover() -> Hierarchies:
    """find() on this host."""
    mountinfo = _text("/proc/self/mountinfo")
    controllers = ""
    for line in mountinfo.splitlines():
        if " - cgroup2 " in line:
            controllers = _text(os.path.join(line.split()[4], "cgroup.controllers"))
    return find(mountinfo, _text("/proc/self/cgroup"), controllers)


class Tree:
    """The subtree of one instance."""

    def __init__(self, instance: str, found: Hierarchies):
        self._name = f"muster-{instance}"
        self._found = found
        self._roots = {place: self._root(place) for place in found.all}

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
        return BoxGroups(
            os.path.join(self._roots[self._found.kill], box),
            os.path.join(self._roots[self._found.memory], box),
            os.path.join(self._roots[self._found.pids], box),
            self._found.memory.v2,
            self._found.pids.v2,
        )

    def add_box(self, box: str, memory_bytes: int, pids: int) -> None:
        """Make the groups of one box; 0 leaves that limit out."""
        for place, root in self._roots.items():
            os.makedirs(os.path.join(root, box, "agent"), exist_ok=True)
            _enable(os.path.join(root, box), self._v2_controllers(place))
        groups = self.groups(box)
        os.makedirs(os.path.join(groups.kill, "init"), exist_ok=True)
        groups.limit(memory_bytes, pids)

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

    @property
    def joins(self) -> list[str]:
        """`cgroup.procs` files that a step enters beside its own v2 leaf."""
        places = ((self.memory, self.memory_v2), (self.pids, self.pids_v2))
        return [os.path.join(path, "agent", "cgroup.procs") for path, v2 in places if not v2]

    @property
    def oom_counter(self) -> str:
        name = "memory.events" if self.memory_v2 else "memory.oom_control"
        return os.path.join(self.memory, "agent", name)

    @property
    def pids_counter(self) -> str:
        return os.path.join(self.pids, "agent", "pids.events")

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
            for directory in dict.fromkeys((self.kill, self.memory, self.pids)):
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
