"""What a box gets of what its caller asked for. Pure."""

from __future__ import annotations

from muster.errors import InvalidInput
from muster.types import Limits
from services.sandbox.config import SandboxConfig

_USUAL = Limits()
_MEMORY_MIN = 8 << 20  # below this bash itself does not start


def most(config: SandboxConfig) -> Limits:
    """What a box may ask for on this host."""
    return Limits(
        config.memory_bytes_max,
        config.pids_max,
        config.disk_bytes_max,
        config.disk_inodes_max,
        config.output_bytes_max,
    )


def resolve(asked: Limits, task: Limits, most: Limits) -> Limits:
    """What is granted, field by field: as asked, else the task's figure, else the usual one.

    Zero stands for "not said" in `asked` and `task`. Raises InvalidInput for a figure out of
    bounds, naming whose it is: a limit is never cut in silence, for that would change the task.
    The usual figures alone give way to a host that has less.
    """
    chosen = {}
    for name in Limits.__struct_fields__:
        highest = getattr(most, name)
        for figure, field in ((getattr(asked, name), f"limits.{name}"), _of_task(task, name)):
            if figure:
                chosen[name] = _bounded(name, figure, field, highest)
                break
        else:
            chosen[name] = min(getattr(_USUAL, name), highest)
    return Limits(**chosen)


def of_task(memory_bytes: int | None, disk_bytes: int | None) -> Limits:
    """What a task says itself; zero where it says nothing."""
    return Limits(memory_bytes or 0, 0, disk_bytes or 0, 0, 0)


def _of_task(task: Limits, name: str) -> tuple[int, str]:
    key = {"memory_bytes": "memory_mb", "disk_bytes": "storage_mb"}.get(name, name)
    return getattr(task, name), f"environment.{key}"


def _bounded(name: str, figure: int, field: str, highest: int) -> int:
    least = _MEMORY_MIN if name == "memory_bytes" else 1
    if least <= figure <= highest:
        return figure
    asker = "in task.toml" if field.startswith("environment.") else "in the job's limits"
    raise InvalidInput(
        f"has to be from {least} to {highest} ({name}) on this host",
        field=field,
        value=figure,
        way_out=f"set another figure {asker}, or raise sandbox.{name}_max",
    )
