"""Every key of task.toml is honoured or refused by name."""

from __future__ import annotations

import pytest

from muster.errors import InvalidInput
from muster.task_toml import TaskSettings, parse


def test_an_empty_file_gives_the_defaults():
    assert parse("") == TaskSettings()


def test_the_older_spelling_of_the_schema_key_is_read():
    assert parse('version = "1.0"') == TaskSettings()


@pytest.mark.parametrize(
    ("text", "field", "way_out"),
    [
        ("[agent]\ntimeout_secs = 3", "agent.timeout_secs", "did you mean 'timeout_sec'?"),
        ("[enviroment]\n", "enviroment", "did you mean 'environment'?"),
        ("[metadata]\nmuster_max_turn = 1", "metadata.muster_max_turn", "'muster_max_turns'"),
        ("[task]\nzzz = 1", "task.zzz", "known are"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(text: str, field: str, way_out: str):
    with pytest.raises(InvalidInput, match="unknown key") as caught:
        parse(text)
    assert caught.value.field == field
    assert way_out in caught.value.way_out


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('[environment]\nnetwork_mode = "public"', "environment.network_mode"),
        ('[agent]\nnetwork_mode = "allowlist"', "agent.network_mode"),
        ('[verifier]\nallowed_hosts = ["x.org"]', "verifier.allowed_hosts"),
        ("[environment]\nallow_internet = true", "environment.allow_internet"),
    ],
)
def test_a_task_that_asks_for_a_network_is_refused(text: str, field: str):
    with pytest.raises(InvalidInput, match="no network") as caught:
        parse(text)
    assert caught.value.field == field
    assert "no-network" in caught.value.way_out


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("[[steps]]\nname = 'one'", "steps"),
        ("[environment]\ndocker_image = 'x'", "environment.docker_image"),
        ("[environment]\ngpus = 1", "environment.gpus"),
        ("[environment]\nos = 'windows'", "environment.os"),
        ("[agent]\nuser = 'dev'", "agent.user"),
        ("[environment]\nenv = {KEY = '${KEY}'}", "environment.env.KEY"),
        ("[environment]\nworkdir = 'app'", "environment.workdir"),
        ("[environment]\nmemory = 'lots'", "environment.memory"),
        ("[environment]\nmemory_mb = -1", "environment.memory_mb"),
        ("[agent]\ntimeout_sec = nan", "agent.timeout_sec"),
        ("[verifier]\ntimeout_sec = 0", "verifier.timeout_sec"),
        ("[metadata]\nmuster_max_turns = 1.5", "metadata.muster_max_turns"),
        ("[metadata]\nmuster_success_threshold = 1.5", "metadata.muster_success_threshold"),
        ("schema_version = '9.0'", "schema_version"),
        ("task = 3", "task"),
        ("not toml", "task.toml"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name(text: str, field: str):
    with pytest.raises(InvalidInput) as caught:
        parse(text)
    assert caught.value.field == field
    assert caught.value.way_out


def test_settings_that_mean_nothing_are_accepted():
    text = "[environment]\ngpus = 0\nmcp_servers = []\ncpus = 2\n[agent]\nuser = 'root'"
    assert parse(text) == TaskSettings()
