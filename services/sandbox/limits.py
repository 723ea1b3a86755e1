"""What a box gets of what its caller asked for (muster.box_limits), on this host. Pure."""

from __future__ import annotations

from muster.box_limits import of_task as of_task
from muster.box_limits import resolve as resolve
from muster.types import Limits
from services.sandbox.config import SandboxConfig


def most(config: SandboxConfig) -> Limits:
    """What a box may ask for on this host; zero processors: as many as it likes."""
    return Limits(
        config.memory_bytes_max,
        config.pids_max,
        config.disk_bytes_max,
        config.disk_inodes_max,
        config.output_bytes_max,
        config.cpus_max,
    )
