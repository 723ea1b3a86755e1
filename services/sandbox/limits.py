"""What a box gets of what its caller asked for. Pure."""

from __future__ import annotations

import msgspec

from muster.errors import InvalidInput
from muster.types import Limits

_MEMORY_MIN = 8 << 20  # below this bash itself does not start


def resolve(asked: Limits, task: Limits, most: Limits) -> Limits:
    """Zero in `asked` takes the task's figure; raises InvalidInput for one out of bounds."""
    chosen = {
        name: getattr(asked, name) or getattr(task, name) for name in Limits.__struct_fields__
    }
    for name, value in chosen.items():
        least = _MEMORY_MIN if name == "memory_bytes" else 1
        if not least <= value <= getattr(most, name):
            raise InvalidInput(
                f"has to be from {least} to {getattr(most, name)} on this host",
                field=f"limits.{name}",
                value=value,
                way_out=f"ask for less, or raise sandbox.{name}_max",
            )
    return Limits(**chosen)


def of_task(memory_bytes: int | None, disk_bytes: int | None) -> Limits:
    """The defaults with what a task says itself."""
    usual = Limits()
    return msgspec.structs.replace(
        usual,
        memory_bytes=memory_bytes or usual.memory_bytes,
        disk_bytes=disk_bytes or usual.disk_bytes,
    )
