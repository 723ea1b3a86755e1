"""Tasks that only some hosts can make boxes for: those whose Dockerfile an image builder must read.

Owns: the check at the front door. Promise: pure; a task set that no announced host can run is
refused whole, by the name of the task and the line of its Dockerfile, before anything is written.
Does not cover: which host gets an episode (fleet.py), what a host can read (the sandbox).
"""

from __future__ import annotations

from collections.abc import Iterable

from muster.errors import InvalidInput
from muster.taskset import Task

BUILDS = ("builds", "dockerfile")  # what a sandbox host that builds announces of itself


def announced(info: dict[str, str]) -> bool:
    """Whether a sandbox host with that information builds whole Dockerfiles."""
    name, value = BUILDS
    return info.get(name) == value


def check(tasks: Iterable[Task], hosts: Iterable[dict[str, str]]) -> None:
    """Raise InvalidInput for the first task that no host can make a box for, by what they tell."""
    if any(announced(info) for info in hosts):
        return
    for task in tasks:
        if task.unbuildable:
            raise InvalidInput(
                f"no announced sandbox host builds images, which this task needs: "
                f"{task.unbuildable}",
                field="environment/Dockerfile",
                value=task.name,
                way_out="start a sandbox host with sandbox.backend = docker, or write the "
                "Dockerfile with FROM, WORKDIR, ENV, COPY, RUN and USER only",
            )
