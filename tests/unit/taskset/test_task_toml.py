"""Every key of task.toml is honoured or refused by name."""

from __future__ import annotations

import pytest

from muster.errors import InvalidInput
from muster.task_fields import TaskSettings
from muster.task_toml import examine, parse


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
        ("[task]\nauthors = [{nam = 'A'}]", "task.authors[].nam", "did you mean 'name'?"),
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
    assert caught.value.way_out.startswith(f"write {field.rpartition('.')[2]} = ")


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("[[steps]]\nname = 'one'", "steps"),
        ("artifacts = ['/out']", "artifacts"),
        ("multi_step_reward_strategy = 'best'", "multi_step_reward_strategy"),
        ("[environment]\ndocker_image = 3", "environment.docker_image"),
        ("[environment]\nskills_dir = 'x'", "environment.skills_dir"),
        ("[environment]\nmcp_servers = [{name = 'x'}]", "environment.mcp_servers"),
        ("[environment.healthcheck]\ncommand = 'true'", "environment.healthcheck"),
        ("[environment]\ntpu = {type = 'x'}", "environment.tpu"),
        ("[environment]\ncpus = 0", "environment.cpus"),
        ("[environment]\ncpus = true", "environment.cpus"),
        ("[[verifier.collect]]\ncommand = 'ls'", "verifier.collect"),
        ("[verifier.environment]\ncpus = 1", "verifier.environment"),
        ("[verifier]\nenvironment_mode = 'none'", "verifier.environment_mode"),
        ("[verifier]\nenv = {KEY = 'a${KEY}'}", "verifier.env.KEY"),
        ("[solution]\nenv = {KEY = '${KEY}'}", "solution.env.KEY"),
        ("[environment]\nenv = {'A B' = 'x'}", "environment.env.A B"),
        ("[metadata]\nmuster_verify = 'open'", "metadata.muster_verify"),
        ("version = '1.0'\nschema_version = '1.4'", "version"),
        ("[environment]\nmemory = '1G'\nmemory_mb = 64", "environment.memory"),
        ("[environment]\nstorage = '0M'", "environment.storage"),
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
    text = "[environment]\ngpus = 0\nmcp_servers = []\n[agent]\nuser = 'root'\n[solution]\n"
    assert parse(text) == TaskSettings()


def test_older_names_say_the_same():
    older = parse("version = '1.1'\n[environment]\nmemory = '2G'\nstorage = '512M'")
    newer = parse("schema_version = '1.1'\n[environment]\nmemory_mb = 2048\nstorage_mb = 512")
    assert older == newer
    assert (older.memory_bytes, older.disk_bytes) == (2 << 30, 512 << 20)


def test_figures_image_and_way_of_verifying_are_honoured():
    settings = parse(
        "[metadata]\nmuster_verify = 'live'\n[environment]\ncpus = 1.5\ndocker_image = 'a:1'\n"
    )
    assert (settings.cpus, settings.image, settings.verify) == (1.5, "a:1", "live")


def test_a_variable_of_the_host_stands_for_its_default():
    text = "[environment]\nenv = {A = 'x${HOME:-}y${B:-:-}'}\n[solution]\nenv = {C = '$D'}"
    settings = parse(text)
    assert (settings.env, settings.solution_env) == ((("A", "xy:-"),), (("C", "$D"),))


def test_everything_that_is_wrong_is_told_at_once():
    _, found = examine("artifacts = ['x']\n[agent]\nuser = 'dev'\n[environment]\ngpus = 1\nos = 3")
    fields = {refusal.field for refusal in found.refusals}
    assert fields == {"artifacts", "agent.user", "environment.gpus", "environment.os"}


def test_what_has_no_effect_is_remarked():
    _, found = examine(
        "multi_step_reward_strategy = 'mean'\n[verifier]\nenvironment_mode = 'separate'\n"
        "[environment]\nbuild_timeout_sec = 5\n[task]\nversion = '1'\n"
    )
    assert not found.refusals
    assert [remark.field for remark in found.remarks] == [
        "multi_step_reward_strategy",
        "verifier.environment_mode",
        "environment.build_timeout_sec",
    ]
