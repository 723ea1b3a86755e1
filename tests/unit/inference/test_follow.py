"""Who may follow the recorded versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.config import load_config
from muster.errors import ConfigError
from muster.lifecycle import Lifecycle
from services.inference.__main__ import serve_replica
from services.inference.config import InferenceConfig
from services.inference.engine import Engine


def never(settings: InferenceConfig, folder: Path) -> Engine:
    raise AssertionError("an engine was made")


async def test_a_real_engine_that_is_to_follow_is_refused_before_anything_starts() -> None:
    env = {
        "MUSTER_REDIS__URL": "redis://127.0.0.1:1",  # nobody is asked anything
        "MUSTER_INFERENCE__FOLLOW_VERSIONS": "true",
    }
    with pytest.raises(ConfigError, match="trainer alone") as caught:
        await serve_replica(Lifecycle("inference", load_config(None, env), 1.0), never)
    assert caught.value.field == "inference.follow_versions"
