"""The control of bench.sandbox: clone + overlay + exec of a command, and nothing else.

One process with a base of its own (made as the service makes it). Asked line by line on stdin for
{"command", "at_once", "layer"}, it answers the milliseconds that each took from the beginning of
its batch to the end of the command. layer: `fresh` (over the base), `fork` (over the base and a
layer with the files of FILES) or `none` (fork, chroot and exec alone). With layer `kill` the
command leaves a tree of processes in a cgroup, and the times are those of `cgroup.kill` until each
group is empty. What the control leaves out is what a box adds: limits, a filter, capabilities, a
session, an agent's PID 1, requests, results.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from typing import NoReturn

from services.sandbox.adapters.native import hierarchies, rootfs
from services.sandbox.adapters.native import syscalls as sc

BASH = "echo hello"
PYTHON = "python3 -c 'print(1)'"
VERIFY = "echo 1 > /tmp/reward.txt"
FILES = {f"{number:03d}.txt": f"{number}\n" * 200 for number in range(100)}
# Three sessions that ignore SIGTERM, each with a child; goes on when it stands.
TREE = (
    "for i in 1 2 3; do "
    "setsid bash -c 'trap \"\" TERM; sleep 1000; :' </dev/null >/dev/null 2>&1 & "
    "done; until set -- /proc/[0-9]*; [ $# -ge 7 ]; do sleep 0.02; done; echo $#"
)
TREE_SIZE = 6  # in a box the shell is there as well
_NAMESPACES = sc.CLONE_NEWNS | sc.CLONE_NEWPID | sc.CLONE_NEWIPC | sc.CLONE_NEWUTS | sc.CLONE_NEWNET
_BASE, _ROOT, _LAYER = "base", "root", "layer"
_STANDS_S = 30.0


def main() -> None:
    """Serve until stdin ends."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # mounts and groups go then too
    sc.unshare(sc.CLONE_NEWNS)
    sc.mount("", "/", "", sc.MS_REC | sc.MS_PRIVATE)
    group = tempfile.mkdtemp(prefix="muster-bare-", dir=hierarchies.discover().kill.directory)
    stage = tempfile.mkdtemp(prefix="muster-bare-")
    sc.mount("tmpfs", stage, "tmpfs", 0, "size=64m")
    os.chdir(stage)
    try:
        rootfs.build_base(_BASE)
        os.mkdir(_ROOT)
        _fill(f"{_LAYER}/app/data")
        print("ready", flush=True)
        _serve(group)
    except (BrokenPipeError, KeyboardInterrupt):
        print("the control ends before it was asked to", file=sys.stderr)
    finally:  # nothing is removed below it: the machine's /usr is mounted there
        os.chdir("/")
        os.rmdir(group)
        sc.unmount(stage)
        os.rmdir(stage)


def _serve(group: str) -> None:
    count = 0
    for line in sys.stdin:
        asked = json.loads(line)
        names = [f"b{count + number}" for number in range(asked["at_once"])]
        count += len(names)
        if asked["layer"] == "kill":
            took = _kill(asked["command"], [f"{group}/{name}" for name in names])
        else:
            took = _batch(asked["command"], names, asked["layer"])
        print(json.dumps(took), flush=True)


def _fill(folder: str) -> None:
    os.makedirs(folder)
    for name, text in FILES.items():
        with open(f"{folder}/{name}", "w", encoding="utf-8") as file:
            file.write(text)


def _batch(command: str, names: list[str], layer: str) -> list[float]:
    began = time.monotonic()
    running = {}
    for name in names:
        pid = os.fork()
        if pid == 0:
            if layer != "none":
                _enter_layer(name, f"{_LAYER}:{_BASE}" if layer == "fork" else _BASE)
            _become(command, _BASE if layer == "none" else _ROOT)
        running[pid] = name
    took = []
    while running:
        pid, status = os.wait()
        if status != 0:
            raise SystemExit(f"the control failed: {status}")
        took.append((time.monotonic() - began) * 1000)
        del running[pid]
    for name in names if layer != "none" else ():  # not timed
        sc.unmount(name)
        os.rmdir(name)
    return took


def _enter_layer(name: str, lower: str) -> None:
    """The child: namespaces and a layer of its own; returns in a child that is PID 1 there."""
    os.mkdir(name)
    sc.mount("tmpfs", name, "tmpfs", 0, "size=32m")
    sc.unshare(_NAMESPACES)
    inner = os.fork()
    if inner:
        _, status = os.waitpid(inner, 0)
        os._exit(os.waitstatus_to_exitcode(status))
    sc.mount("", "/", "", sc.MS_REC | sc.MS_PRIVATE)
    upper, work = f"{name}/upper", f"{name}/work"
    os.mkdir(upper)
    os.mkdir(work)
    sc.mount("overlay", _ROOT, "overlay", 0, f"lowerdir={lower},upperdir={upper},workdir={work}")
    sc.mount(f"{_BASE}/usr", f"{_ROOT}/usr", "", sc.MS_BIND | sc.MS_REC)


def _become(command: str, root: str) -> NoReturn:
    os.chroot(root)
    os.chdir("/")
    out = "/tmp/out" if root != "/" else os.devnull
    os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT), 1)
    os.execve("/usr/bin/bash", ["bash", "--norc", "-c", command], {"PATH": "/usr/bin:/bin"})


def _kill(command: str, groups: list[str]) -> list[float]:
    children = []
    for group in groups:
        os.mkdir(group)
        pid = os.fork()
        if pid == 0:
            _write(f"{group}/cgroup.procs", "0")
            _become(command, "/")
        children.append(pid)
    for pid in children:  # the shells end, what they started stays
        os.waitpid(pid, 0)
    for group in groups:
        _stands(group)
    began = time.monotonic()
    for group in groups:
        _write(f"{group}/cgroup.kill", "1")
    took, waiting = [], list(groups)
    while waiting:
        for group in [group for group in waiting if not _populated(group)]:
            took.append((time.monotonic() - began) * 1000)
            waiting.remove(group)
        time.sleep(0.0001)
    for group in groups:  # not timed
        os.rmdir(group)
    return took


def _stands(group: str) -> None:
    """Wait until the whole tree is there: else its kill would be measured of less."""
    until = time.monotonic() + _STANDS_S
    while len(_read(f"{group}/cgroup.procs").split()) < TREE_SIZE:
        if time.monotonic() > until:
            raise SystemExit("the control's tree does not stand")
        time.sleep(0.005)


def _populated(group: str) -> bool:
    return "populated 1" in _read(f"{group}/cgroup.events")


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


if __name__ == "__main__":
    main()
