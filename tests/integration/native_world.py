"""Real boxes for tests of snapshots: a step's words, and what the keeper holds."""

from __future__ import annotations

from pathlib import Path

from muster.types import Limits
from services.sandbox.adapters.native.backend import NativeBackend
from services.sandbox.box import Evidence, Source

ENV = {"PATH": "/usr/bin:/bin", "HOME": "/root"}


async def fresh(
    backend: NativeBackend, box: str, layer: str = "", limits: Limits | None = None
) -> None:
    await backend.start(box, limits or Limits(), Source(layer=layer))
    await backend.set_session(box, "/app", dict(ENV))


def output(found: Evidence) -> str:
    return (found.head + found.tail).decode("utf-8", "replace")


async def told(backend: NativeBackend, box: str, command: str) -> str:
    return output(await backend.run(box, command, 60))


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def mounts(keeper: int) -> list[str]:
    """Mount points on the keeper's stage but the bases: boxes and snapshots."""
    lines = Path(f"/proc/{keeper}/mountinfo").read_text().splitlines()
    points = [line.split()[4].partition("/stage/")[2] for line in lines]
    return [point for point in points if point and not point.startswith("base/")]
