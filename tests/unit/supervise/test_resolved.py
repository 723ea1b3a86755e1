"""The resolved configuration reads back equal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from muster.config import load_config
from muster.errors import ConfigError
from muster.supervise.prepare import check_given
from muster.supervise.resolved import resolve, toml_of


def test_what_is_written_reads_back_equal(tmp_path: Path) -> None:
    awkward = tmp_path / 'a "quoted" \\ folder\x7f'
    config = load_config(None, {"MUSTER_STATE_DIR": str(awkward), "MUSTER_RUN": "r.1"})
    resolved = resolve(config, redis_url="unix:///tmp/x.sock", model="/models/ü")
    file = tmp_path / "muster.toml"
    file.write_text(toml_of(resolved), encoding="utf-8")
    assert load_config(file, {}) == resolved


def test_resolving_touches_only_the_address_and_the_model() -> None:
    config = load_config(None, {})
    resolved = resolve(config, redis_url="unix:///s", model="/m")
    assert resolved.redis.url == "unix:///s"
    assert resolved.model.path == "/m"
    assert resolve(resolved, redis_url=config.redis.url, model=config.model.path) == config


@pytest.mark.parametrize(
    ("replicas", "asked", "threads"), [(1, 0, 0), (2, 3, 3), (2, 0, 0), (64, 0, 1)]
)
def test_several_replicas_share_the_cores_unless_told_otherwise(
    replicas: int, asked: int, threads: int
) -> None:
    config = load_config(
        None, {"MUSTER_REPLICAS": str(replicas), "MUSTER_INFERENCE__THREADS": str(asked)}
    )
    given = resolve(config, redis_url="unix:///s", model="/m").sections["inference"]
    expected = threads or (max(1, (os.cpu_count() or 1) // 2) if replicas > 1 else 0)
    assert getattr(given, "threads") == expected  # noqa: B009 - of a section that is not known here


def test_several_replicas_cannot_listen_on_one_port() -> None:
    config = load_config(
        None, {"MUSTER_REPLICAS": "2", "MUSTER_INFERENCE__LISTEN": "127.0.0.1:7500"}
    )
    with pytest.raises(ConfigError, match="2 replicas cannot listen on one port"):
        check_given(config)
