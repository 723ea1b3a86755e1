"""What a sandbox host can make boxes for, as it announces it, and who can start a task at all.

Owns: the words in the registry, and the one check that a host and the router make of a task.
Promise: pure; a task is refused with the text that the host itself would refuse it with. Does not
cover: how full a host is (it says so when it is asked), which host gets an episode (the router).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from muster import box_limits, dockerfile, image_names
from muster.errors import InvalidInput
from muster.taskset import Task
from muster.types import Limits, Value


class Offer(Value, frozen=True):
    """builds: whole Dockerfiles, by an image builder. bases: patterns of the images that it knows,
    None where it does not say. most: the highest figures of a box, likewise."""

    builds: bool = False
    bases: tuple[str, ...] | None = None
    most: Limits | None = None
    limits_cpu: bool = True

    def info(self) -> dict[str, str]:
        """For the registry."""
        return {
            "builds": "dockerfile" if self.builds else "",
            "bases": " ".join(self.bases or ()),
            "limits_cpu": "yes" if self.limits_cpu else "no",
            "limits_max": msgspec.json.encode(self.most or Limits()).decode(),
        }

    def check(self, task: Task, asked: Limits) -> None:
        """Raises InvalidInput for a task that such a host can never start.

        asked: the limits that the caller asks for, which go before the task's.
        """
        if self.most is not None:
            own = box_limits.of_task(task.memory_bytes, task.disk_bytes, task.cpus)
            box_limits.resolve(asked, own, self.most, limits_cpu=self.limits_cpu)
        if task.unbuildable:
            check_builds(task, builds=self.builds)
        elif self.bases is not None and image_names.fitting(self.bases, task.base) is None:
            error = image_names.unknown(task.base, self.bases)
            if task.verdict == "pytest":  # a folder of Terminal-Bench 1
                error.field = error.field.removeprefix("environment/")
            raise error


def read(info: Mapping[str, str]) -> Offer:
    """What a host said of itself; what it did not say, or not readably, refuses nothing."""
    try:
        most = msgspec.json.decode(info["limits_max"], type=Limits)
    except (KeyError, msgspec.MsgspecError):
        most = None
    bases = tuple(info["bases"].split()) if "bases" in info else None
    builds = info.get("builds") == "dockerfile"
    return Offer(builds, bases, most, info.get("limits_cpu") != "no")


def check_builds(task: Task, *, builds: bool) -> None:
    """Raises InvalidInput for a task whose environment this host cannot make."""
    if task.unbuildable and not builds:
        line, _, why = task.unbuildable.partition(": ")
        raise InvalidInput(
            f"only a host that builds images can follow it: {why}",
            field=line,
            value=task.name,
            way_out=dockerfile.way_out(task.unbuildable),
        )
