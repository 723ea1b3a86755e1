"""The configuration as the command line reads it."""

from __future__ import annotations

import os
from pathlib import Path

from muster.config import Config, load_config


def read_config(
    path: Path | None, *, standby: bool = False, allow_volatile: bool = False
) -> Config:
    """Settings from `path` and the environment; ConfigError names what is wrong.

    The flags of the command line only ever switch on.
    """
    config = load_config(path, os.environ)
    redis = config.redis.model_copy(
        update={"allow_volatile": config.redis.allow_volatile or allow_volatile}
    )
    changes = {"redis": redis, "standbys": config.standbys or standby}
    return config.model_copy(update=changes)
