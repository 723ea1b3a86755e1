"""Which cgroup hierarchies this host has, and where: v2, v1 or both.

Owns: the look at /proc. Promise: killing goes through v2 (`cgroup.kill`); each limit goes through
the hierarchy that has its controller, looked for in v2 first and then in v1. All in v2 is a v2
host; all in v1 with an empty v2 beside it, or some here and some there, is a hybrid one; without
any v2 nothing could be killed as a whole, and the host is refused. Memory and pids have to be
there; a host without the cpu controller is taken, and refuses the boxes that ask for a processor
limit. Does not cover: the groups themselves (cgroups.py). Standard library only.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

CONTROLLERS = ("memory", "pids")
OPTIONAL = "cpu"
NO_CPU = (
    "this host has no cpu controller that boxes could be limited by",
    "ask for no processor limit, boot without cgroup_disable=cpu, or mount the controller: "
    "mount -t cgroup -o cpu none /sys/fs/cgroup/cpu",
)


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
    cpu: Place | None = None

    @property
    def all(self) -> list[Place]:
        """What every box has groups in."""
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
    for name in (*CONTROLLERS, OPTIONAL):
        if name in v2_controllers.split():
            places[name] = places[""]
        if name not in places and name in CONTROLLERS:
            raise CgroupTrouble(
                f"the {name} controller is in no mounted cgroup hierarchy",
                f"boot without cgroup_disable={name}, or mount it: "
                f"mount -t cgroup -o {name} none /sys/fs/cgroup/{name}",
            )
    return Hierarchies(places[""], places["memory"], places["pids"], places.get(OPTIONAL))


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
        known = [n for n in options.split(",") if n in (*CONTROLLERS, OPTIONAL)]
        for name in [""] if v2 else known:
            path = paths.get(name, "/")
            below = path.removeprefix(root.rstrip("/")).strip("/") if path.startswith(root) else ""
            directory = os.path.join(mountpoint, below) if below else mountpoint
            places.setdefault(name, Place(directory, mountpoint, v2))
    return places


def discover(mounts: str = "/proc/self/mountinfo") -> Hierarchies:
    """find() on this host."""
    try:
        mountinfo = _text(mounts)
        controllers = ""
        for line in mountinfo.splitlines():
            if " - cgroup2 " in line:
                controllers = _text(os.path.join(line.split()[4], "cgroup.controllers"))
        own = _text("/proc/self/cgroup")
    except OSError as error:  # hidden below another mount, or not readable
        raise CgroupTrouble(
            f"the cgroup hierarchy cannot be read: {error}",
            "umount what hides it (findmnt /sys/fs/cgroup), or mount it again: "
            "mount -t cgroup2 none /sys/fs/cgroup",
        ) from error
    return find(mountinfo, own, controllers)


def _text(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()
