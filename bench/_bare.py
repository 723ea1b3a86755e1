"""The control of bench.sandbox: clone + overlay + exec of a command, and nothing else.

One process with a base of its own (made as the service makes it). Asked line by line on stdin for
{"command", "at_once", "layer"}, it answers the milliseconds that each took from the beginning of
its batch to the end of the command; without a layer it is fork, chroot and exec alone. What it
leaves out is what a box adds: limits, a filter, capabilities, a session, an agent's PID 1,
requests, results.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import NoReturn

from services.sandbox.adapters.native import rootfs
from services.sandbox.adapters.native import syscalls as sc

_NAMESPACES = sc.CLONE_NEWNS | sc.CLONE_NEWPID | sc.CLONE_NEWIPC | sc.CLONE_NEWUTS | sc.CLONE_NEWNET
_BASE, _ROOT = "base", "root"


def main() -> None:
    """Serve until stdin ends."""
    sc.unshare(sc.CLONE_NEWNS)
    sc.mount("", "/", "", sc.MS_REC | sc.MS_PRIVATE)
    with tempfile.TemporaryDirectory(prefix="muster-bare-") as stage:
        sc.mount("tmpfs", stage, "tmpfs", 0, "size=64m")
        os.chdir(stage)
        rootfs.build_base(_BASE)
        os.mkdir(_ROOT)
        print("ready", flush=True)
        count = 0
        for line in sys.stdin:
            asked = json.loads(line)
            names = [f"b{count + number}" for number in range(asked["at_once"])]
            count += len(names)
            took = _batch(asked["command"], names, layer=asked["layer"])
            print(json.dumps(took), flush=True)
        os.chdir("/")
        sc.unmount(stage)


def _batch(command: str, names: list[str], *, layer: bool) -> list[float]:
    began = time.monotonic()
    running = {}
    for name in names:
        pid = os.fork()
        if pid == 0:
            if layer:
                _enter_layer(name)
            _become(command, _ROOT if layer else _BASE)
        running[pid] = name
    took = []
    while running:
        pid, status = os.wait()
        if status != 0:
            raise SystemExit(f"the control failed: {status}")
        took.append((time.monotonic() - began) * 1000)
        del running[pid]
    for name in names if layer else ():  # not timed
        sc.unmount(name)
        os.rmdir(name)
    return took


def _enter_layer(name: str) -> None:
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
    sc.mount("overlay", _ROOT, "overlay", 0, f"lowerdir={_BASE},upperdir={upper},workdir={work}")
    sc.mount(f"{_BASE}/usr", f"{_ROOT}/usr", "", sc.MS_BIND | sc.MS_REC)


def _become(command: str, root: str) -> NoReturn:
    os.chroot(root)
    os.chdir("/")
    os.dup2(os.open("/tmp/out", os.O_WRONLY | os.O_CREAT), 1)
    os.execve("/usr/bin/bash", ["bash", "--norc", "-c", command], {"PATH": "/usr/bin:/bin"})


if __name__ == "__main__":
    main()
