"""Can this host isolate? Each finding with its way out; the last is a real box.

Owns: what `--check-host` prints. Promise: it changes nothing that outlives it.
"""

from __future__ import annotations

import os
import platform
import tempfile
from pathlib import Path

from muster.errors import HostUnfit
from muster.types import Limits, Value
from services.sandbox.adapters.native import seccomp
from services.sandbox.adapters.native.backend import open_native
from services.sandbox.adapters.native.hierarchies import NO_CPU, CgroupTrouble, discover
from services.sandbox.box import BoxFailure

_TRIAL = "test $$ -gt 1 && python3 -c 'print(1 + 1)' && ! ls /sys && exit 7"


class Finding(Value, frozen=True):
    """One thing looked at; way_out says what to do when it is not well."""

    what: str
    well: bool
    way_out: str = ""


async def check() -> list[Finding]:
    """Look at everything that a native box needs, then start one, run a step, end it."""
    machine = platform.machine()
    findings = [
        Finding(f"user id {os.geteuid()} (root needed)", os.geteuid() == 0, "run it as root"),
        Finding(
            f"Linux {platform.release()} on {machine} (5.14 or newer, x86_64 or aarch64)",
            _release() >= (5, 14) and seccomp.program(machine) is not None,
            "use a newer kernel, or one of these machines",
        ),
        Finding(
            "/usr/bin/bash and /usr/bin/python3 (boxes see the host's /usr)",
            all(os.access(f"/usr/bin/{name}", os.X_OK) for name in ("bash", "python3")),
            "apt-get install bash python3",
        ),
        Finding(
            "overlayfs",
            "overlay" in _filesystems(),
            "modprobe overlay",
        ),
        _cgroups(),
    ]
    if all(finding.well for finding in findings):
        findings.append(await _trial())
    return findings


def _filesystems() -> str:
    return Path("/proc/filesystems").read_text("utf-8")


def _release() -> tuple[int, ...]:
    parts = platform.release().split("-")[0].split(".")[:2]
    return tuple(int(part) for part in parts if part.isdecimal())


def _cgroups() -> Finding:
    try:
        found = discover()
    except CgroupTrouble as trouble:
        return Finding(f"cgroups: {trouble.problem}", False, trouble.way_out)
    places = (("kill", found.kill), ("memory", found.memory), ("pids", found.pids))
    kinds = ", ".join(
        f"{name} {'v2' if place.v2 else 'v1'} {place.directory}"
        for name, place in (*places, *([("cpu", found.cpu)] if found.cpu else []))
    )
    lacks = "" if found.cpu else f"; {NO_CPU[0]}: tasks and jobs that ask for one are refused"
    return Finding(f"cgroups: {kinds}{lacks}", True)


async def _trial() -> Finding:
    with tempfile.TemporaryDirectory(prefix="muster-check-") as folder:
        try:
            async with open_native(Path(folder) / "run") as backend:
                cpu = backend.limits_cpu
                await backend.start("trial", Limits(cpus=1.0 if cpu else 0.0))
                await backend.set_session("trial", "/", {"PATH": "/usr/bin:/bin"})
                found = await backend.run("trial", _TRIAL, 20.0)
        except (HostUnfit, BoxFailure) as failure:
            way_out = getattr(failure, "way_out", "") or "see the lines above"
            return Finding(f"a box: {getattr(failure, 'problem', failure)}", False, way_out)
    stall = "told" if found.cpu_stall_s >= 0 else "not told: a starved step counts as a slow one"
    well = found.exit_code == 7 and not found.broken
    shown = (found.broken or (found.head + found.tail).decode("utf-8", "replace"))[-300:]
    what = (
        f"a box: started, ran python3, ended; processor limits {'' if cpu else 'not '}possible; "
        f"pressure stall {stall}"
        if well
        else f"a box: {shown!r}"
    )
    return Finding(what, well, "report this with the output of uname -a and mount")


def told(findings: list[Finding], backend: str = "native") -> list[str]:
    """For people: one line each, then the sum."""
    lines = [
        f"{'ok     ' if finding.well else 'MISSING'} {finding.what}"
        + ("" if finding.well else f"\n        → {finding.way_out}")
        for finding in findings
    ]
    well = all(finding.well for finding in findings)
    can = "can" if well else "cannot"
    asked = "isolate boxes" if backend == "native" else f"run the {backend} backend"
    return [*lines, f"This host {can} {asked}."]
