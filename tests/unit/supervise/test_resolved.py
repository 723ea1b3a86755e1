"""The resolved configuration reads back equal."""

from __future__ import annotations

from pathlib import Path

from muster.config import load_config
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
