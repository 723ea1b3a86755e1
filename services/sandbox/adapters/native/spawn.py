"""A forked child of the keeper becomes PID 1 of a box.

Promise: by the time its loop runs it sees the box's file system only, holds no descriptor but its
doors, and dies with the keeper. What goes wrong before is told on the control socket.
Standard library only.
"""

from __future__ import annotations

import os
import resource
import socket
from dataclasses import dataclass

from services.sandbox.adapters.native import rootfs, wire
from services.sandbox.adapters.native import syscalls as sc
from services.sandbox.adapters.native.boxinit import Init
from services.sandbox.adapters.native.cgroups import BoxGroups
from services.sandbox.adapters.native.confine import Rules
from services.sandbox.adapters.native.snapshots import Below
from services.sandbox.adapters.native.steps import Doors

# What a box is protected by. The service always asks for all; tests leave one out at a time.
DEFENCES = frozenset(
    {
        *("caps", "filter", "privileges", "descriptors", "rlimits", "kill"),
        *("network", "ipc", "processes"),
        *("skeleton", "pivot", "proc", "masks", "hidden", "nosuid", "nodev"),
        *("pids", "memory", "disk", "verdict"),
    }
)
_LIMITS = {
    # 1 and not 0: a host that pipes core dumps into a program would run it even at 0.
    resource.RLIMIT_CORE: (1, 1),
    resource.RLIMIT_NOFILE: (1024, 4096),
}


@dataclass
class Box:
    """One box, or one verifier of it, as the keeper knows it; pid is 0 once it has ended.

    door: the keeper's end of its way to PID 1, which gives the box to another service.
    """

    folder: str
    base: rootfs.Base
    groups: BoxGroups
    layers: rootfs.Layers
    below: Below
    pid: int = 0
    door: socket.socket | None = None
    leaving: bool = False  # into a snapshot


def become_init(
    box: Box,
    defences: frozenset[str],
    fd: int,
    keeper: socket.socket,
    filter_program: bytes | None,
    network: int = -1,
) -> None:
    """In the forked child: namespaces, mounts, then PID 1's loop. Never returns.

    network: descriptor of another box's network namespace to share; -1 for one of its own.
    """
    control = socket.socket(fileno=os.dup(fd))
    try:
        sc.die_with_parent()
        sc.set_dumpable(False)
        sc.set_name("muster-box")
        _enter(os.path.join(box.groups.kill, "init", "cgroup.procs"))
        ipc = sc.CLONE_NEWIPC if "ipc" in defences else 0
        sc.unshare(sc.CLONE_NEWNS | sc.CLONE_NEWUTS | ipc)
        _enter_network(network, own="network" in defences)
        socket.sethostname("box")
        sc.mount("", "/", "", sc.MS_REC | sc.MS_PRIVATE)
        rootfs.mount_box(box.base, box.layers, defences)
        doors = _open_doors(box, control, keeper)
        if "pivot" in defences:
            sc.pivot_to(box.layers.root)
        else:
            os.chroot(box.layers.root)
            os.chdir("/")
        _close_others(doors)
        os.dup2(doors.null, 2)  # the service's may be a pipe that somebody reads to its end
        rules = Rules(
            sc.AGENT_CAPS if "caps" in defences else -1,
            filter_program if "filter" in defences else None,
            kill_tree="kill" in defences,
            no_new_privileges="privileges" in defences,
            close_descriptors="descriptors" in defences,
        )
        for kind, limit in _LIMITS.items() if "rlimits" in defences else ():
            resource.setrlimit(kind, limit)
        os.setgroups([])
        os.nice(-5)  # a busy box must not starve its own time limit
        Init(doors, rules).run()
    except BaseException as error:  # noqa: BLE001 - a forked child must never return
        if not isinstance(error, SystemExit):
            _report(control, error)
    finally:
        os._exit(0)


def _enter_network(shared: int, *, own: bool) -> None:
    if shared >= 0:
        sc.setns(shared, sc.CLONE_NEWNET)
    elif own:
        sc.unshare(sc.CLONE_NEWNET)
        sc.loopback_up()


def _report(control: socket.socket, error: BaseException) -> None:
    try:
        wire.send(control, {"error": f"{type(error).__name__}: {error}"})
    except OSError:
        return  # nobody is left to hear it


def _open_doors(box: Box, control: socket.socket, keeper: socket.socket) -> Doors:
    groups = box.groups
    folder = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    return Doors(
        control=control,
        keeper=keeper,
        group=os.open(os.path.join(groups.kill, "agent"), folder),
        joins=[os.open(path, os.O_WRONLY | os.O_CLOEXEC) for path in groups.joins],
        oom=os.open(groups.oom_counter, os.O_RDONLY | os.O_CLOEXEC),
        pids=os.open(groups.pids_counter, os.O_RDONLY | os.O_CLOEXEC),
        disk=os.open(box.folder, folder),
        state=os.open(os.path.join(box.layers.root, rootfs.STATE_DIR), folder),
        null=os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC),
        throttle=_opened(groups.throttle_counter),
    )


def _opened(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC) if path else -1


def _close_others(doors: Doors) -> None:
    keep = sorted(
        {0, 1, 2, doors.control.fileno(), doors.keeper.fileno(), doors.group, doors.oom, doors.pids,
         doors.disk, doors.state, doors.null, *doors.joins,
         *([doors.throttle] if doors.throttle >= 0 else [])}
    )  # fmt: skip
    for low, high in zip(keep, [*keep[1:], 1 << 20], strict=True):
        os.closerange(low + 1, high)


def _enter(procs: str) -> None:
    handle = os.open(procs, os.O_WRONLY | os.O_CLOEXEC)
    os.write(handle, b"0")
    os.close(handle)
