"""The configuration as the command line reads it."""

from __future__ import annotations

import os
from pathlib import Path

from muster.config import Config, load_config


def read_config(
    path: Path | None,
    *,
    state_dir: Path | None = None,
    standby: bool = False,
    allow_volatile: bool = False,
) -> Config:
    """Settings from `path` and the environment; ConfigError names what is wrong.

    `state_dir` stands above both. The flags of the command line only ever switch on.
    """
    config = load_config(path, os.environ)
    redis = config.redis.model_copy(
        update={"allow_volatile": config.redis.allow_volatile or allow_volatile}
    )
    changes: dict[str, object] = {"redis": redis, "standbys": config.standbys or standby}
    if state_dir is not None:
        changes["state_dir"] = state_dir.expanduser().resolve()
    return config.model_copy(update=changes)
