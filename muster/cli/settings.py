"""The configuration as the command line reads it."""

from __future__ import annotations

import os
from pathlib import Path

from muster.config import Config, load_config


def read_config(path: Path | None) -> Config:
    """Settings from `path` and the environment; ConfigError names what is wrong."""
    return load_config(path, os.environ)
