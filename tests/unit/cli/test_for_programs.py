"""What a program gets: the version, errors as objects, the flags of durability and standby."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from muster.cli.main import main
from muster.cli.settings import read_config


def run(*arguments: str) -> object:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


def test_the_version_is_that_of_the_package(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capfd.readouterr().out == f"muster {version('muster-rl')}\n"


def test_with_json_an_error_is_an_object_on_stdout(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "muster.toml"
    config.write_text("[redis]\nappendfsync = 'no'\n")
    assert run("up", "--dry-run", "--json", "--config", str(config)) == 2
    said = capfd.readouterr()
    told: dict[str, Any] = json.loads(said.out)
    assert (told["event"], told["kind"], told["field"]) == (
        "error",
        "ConfigError",
        "redis.appendfsync",
    )
    assert told["value"] == "no"
    assert "--allow-volatile" in told["way_out"]
    assert len(said.err.splitlines()) == 1


def test_without_json_stdout_stays_empty(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("up", "--config", str(tmp_path / "none.toml")) == 2
    assert capfd.readouterr().out == ""


def test_the_flags_only_ever_switch_on(tmp_path: Path) -> None:
    config = tmp_path / "muster.toml"
    config.write_text("standbys = true\n[redis]\nallow_volatile = true\n")
    found = read_config(config)
    assert (found.standbys, found.redis.allow_volatile) == (True, True)
    plain = read_config(None)
    assert (plain.standbys, plain.redis.allow_volatile) == (False, False)
    asked = read_config(None, standby=True, allow_volatile=True)
    assert (asked.standbys, asked.redis.allow_volatile) == (True, True)


def test_a_volatile_policy_is_accepted_when_it_is_said(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "muster.toml"
    config.write_text("[redis]\nappendfsync = 'no'\n")
    assert run("up", "--dry-run", "--allow-volatile", "--config", str(config)) == 0
    assert "--appendfsync no" in capfd.readouterr().out
