"""What a box gets of what its caller asked for: one reading, for hosts and for who chooses them.

Promise: pure; a figure is granted or refused by name, never cut in silence. Does not cover: what a
host's highest figures are (its configuration), setting the limits (the sandbox's adapters).
"""

from __future__ import annotations

from typing import Any

from muster.errors import InvalidInput
from muster.types import Limits

_USUAL = Limits()
# Least figures: below, bash itself does not start, or the kernel takes no such limit.
_LEAST = {"memory_bytes": 8 << 20, "cpus": 0.01}
_UNLIMITED = float("inf")
_TOML = {"memory_bytes": "memory_mb", "disk_bytes": "storage_mb"}


def resolve(asked: Limits, task: Limits, most: Limits, *, limits_cpu: bool = True) -> Limits:
    """What is granted, field by field: as asked, else the task's figure, else the usual one.

    Zero stands for "not said" in `asked` and `task`. limits_cpu: whether the backend can limit
    processors on this host. Raises InvalidInput for a figure out of bounds, naming whose it is: a
    limit is never cut in silence, for that would change the task. The usual figures alone give way
    to a host that has less; the usual number of processors is the host's highest.
    """
    chosen: dict[str, Any] = {}
    for name in Limits.__struct_fields__:
        highest = getattr(most, name)
        for figure, field in ((getattr(asked, name), f"limits.{name}"), _of_task(task, name)):
            if figure:
                chosen[name] = _bounded(name, figure, field, highest)
                break
        else:
            chosen[name] = highest if name == "cpus" else min(getattr(_USUAL, name), highest)
        if name == "cpus" and chosen[name] and not limits_cpu:
            raise _no_cpu_limit(chosen[name], field if figure else "sandbox.cpus_max")
    return Limits(**chosen)


def of_task(memory_bytes: int | None, disk_bytes: int | None, cpus: float | None = None) -> Limits:
    """What a task says itself; zero where it says nothing."""
    return Limits(memory_bytes or 0, 0, disk_bytes or 0, 0, 0, cpus or 0.0)


def _of_task(task: Limits, name: str) -> tuple[float, str]:
    return getattr(task, name), f"environment.{_TOML.get(name, name)}"


def _bounded(name: str, figure: float, field: str, highest: float) -> float:
    least = _LEAST.get(name, 1)
    if least <= figure <= (highest or _UNLIMITED):
        return figure
    shown, unit = (_in_mib, " MiB") if field.endswith("_mb") else (_as_is, "")
    bounds = f"from {shown(least)} to {shown(highest)}" if highest else f"at least {shown(least)}"
    asker = "in task.toml" if field.startswith("environment.") else "in the job's limits"
    raise InvalidInput(
        f"has to be {bounds}{unit} ({name}) on this host",
        field=field,
        value=shown(figure),
        way_out=f"set another figure {asker}, or raise sandbox.{name}_max",
    )


def _in_mib(figure: float) -> str:
    return f"{figure / (1 << 20):.6g}"


def _as_is(figure: float) -> str:
    return f"{figure}"


def _no_cpu_limit(figure: float, field: str) -> InvalidInput:
    return InvalidInput(
        "this sandbox host cannot limit processors: it has no cpu controller for its boxes",
        field=field,
        value=figure,
        way_out="ask for none (0), or run it where --check-host finds the cpu controller",
    )
