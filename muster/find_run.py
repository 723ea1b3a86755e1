"""Where a run is: for programs that join one and are none of its services.

Owns: `find_run`. Promise: what runs on this machine under `muster up` is found by its state folder
alone, with the settings that it really has; connects to nothing. Does not cover: reading a run that
has ended (attach.py).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypedDict

from muster.config import Config, load_config
from muster.errors import Unavailable
from muster.supervise.plan import config_file
from muster.supervise.state import runtime_dir


class Where(TypedDict, total=False):
    """The arguments of `find_run`, for those who pass them on."""

    config: Path | str | None
    state_dir: Path | str | None
    redis_url: str
    run: str


def find_run(
    config: Path | str | None = None,
    *,
    state_dir: Path | str | None = None,
    redis_url: str = "",
    run: str = "",
) -> Config:
    """The configuration of a run, with the address of its Redis.

    config, MUSTER_* variables: as of every command. Without a Redis in them or in `redis_url`: the
    `muster up` that runs with this state folder, as it is configured. `run`: another than
    configured. Raises ConfigError; Unavailable when no `muster up` runs there.
    """
    found = load_config(None if config is None else Path(config), os.environ)
    if state_dir is not None:
        found = found.model_copy(update={"state_dir": Path(state_dir).expanduser().resolve()})
    if redis_url:
        redis = found.redis.model_copy(update={"url": redis_url})
        found = found.model_copy(update={"redis": redis})
    if not found.redis.url:
        resolved = config_file(runtime_dir(found.state_dir))
        if not resolved.is_file():
            raise Unavailable(
                "no `muster up` runs with this state folder",
                field="state_dir",
                value=found.state_dir,
                way_out="start it with `muster up --without trainer`, name the folder of the one "
                "that runs, or its Redis with redis_url",
            )
        found = load_config(resolved, {})
    return found.model_copy(update={"run": run}) if run else found
