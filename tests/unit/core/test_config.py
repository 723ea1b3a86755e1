"""Configuration: what is read, and an error that names field, value and way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.config import Config, load_config
from muster.errors import ConfigError
from services.trainer.config import TrainerConfig


def load(tmp_path: Path, text: str = "", **environ: str) -> Config:
    path = tmp_path / "muster.toml"
    path.write_text(text, "utf-8")
    return load_config(path, environ)


def refused(tmp_path: Path, text: str = "", **environ: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, **environ)
    return caught.value


def test_defaults_need_no_file() -> None:
    config = load_config(None, {})
    assert (config.run, config.redis.url) == ("main", "")
    assert config.state_dir.is_absolute()
    assert set(config.sections) == {"router", "inference", "sandbox", "readybank", "trainer"}


def test_the_file_is_read(tmp_path: Path) -> None:
    config = load(tmp_path, 'run = "x"\n[redis]\nurl = "redis://h"\n[trainer]\nepochs = 3\n')
    assert (config.run, config.redis.url) == ("x", "redis://h")
    assert config.section("trainer", TrainerConfig).epochs == 3


def test_a_variable_names_the_file_where_a_command_is_given_none(tmp_path: Path) -> None:
    named = tmp_path / "named.toml"
    named.write_text('run = "named"\n', "utf-8")
    environ = {"MUSTER_CONFIG": str(named)}
    assert load_config(None, environ).run == "named"
    assert load_config(None, {**environ, "MUSTER_RUN": "above"}).run == "above"
    assert load(tmp_path, 'run = "given"', **environ).run == "given"
    with pytest.raises(ConfigError, match="no such file") as caught:
        load_config(None, {"MUSTER_CONFIG": str(tmp_path / "none.toml")})
    assert caught.value.field == "MUSTER_CONFIG"


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        'run = "x"\n[redis]\nallow_volatile = false\nurl = "redis://file"\n',
        MUSTER_RUN="y",
        MUSTER_REDIS__ALLOW_VOLATILE="true",
        MUSTER_TRAINER__EPOCHS="3",
        MUSTER_TEST_ANYTHING="1",
        OTHER="1",
    )
    assert (config.run, config.redis.allow_volatile) == ("y", True)
    assert config.redis.url == "redis://file"
    assert config.section("trainer", TrainerConfig).epochs == 3


def test_the_result_cannot_be_changed(tmp_path: Path) -> None:
    config = load(tmp_path)
    with pytest.raises(ValueError, match="frozen"):
        config.run = "other"  # type: ignore[misc]


UNKNOWN_KEYS = [
    ('rn = "x"', {}, "rn", "run"),
    ("[trainr]\nepochs = 1", {}, "trainr", "trainer"),
    ('[redis]\nulr = "x"', {}, "redis.ulr", "redis.url"),
    ("[trainer]\nepoch = 1", {}, "trainer.epoch", "trainer.epochs"),
    ("[sections]\nx = 1", {}, "sections", None),
    ("", {"MUSTER_RNU": "x"}, "rnu", "run"),
    ("", {"MUSTER_REDIS__ULR": "x"}, "redis.ulr", "redis.url"),
    ("", {"MUSTER_REDSI__URL": "x"}, "redsi", "redis"),
    ("", {"MUSTER_A__B__C": "x"}, "a__b", None),
]


@pytest.mark.parametrize(("text", "environ", "field", "nearest"), UNKNOWN_KEYS)
def test_an_unknown_key_is_refused_with_the_nearest(
    tmp_path: Path, text: str, environ: dict[str, str], field: str, nearest: str | None
) -> None:
    error = refused(tmp_path, text, **environ)
    assert (error.field, "unknown key" in error.problem) == (field, True)
    if nearest:
        assert error.way_out == f"did you mean {nearest!r}?"


def test_an_unknown_key_shows_the_value_that_it_was_given(tmp_path: Path) -> None:
    error = refused(tmp_path, "", MUSTER_ROUTER__STEP_TIMEOUT="3")
    assert str(error).startswith("router.step_timeout = '3': unknown key (from the environment")
    assert refused(tmp_path, "", MUSTER_REDSI__URL="x").value == "x"
    assert refused(tmp_path, "[trainr]\nepochs = 1").value == ""


BAD_VALUES = [
    ('run = "with space"', {}, "run", "with space"),
    ('run = "a/b"', {}, "run", "a/b"),
    ("run = 5", {}, "run", "5"),
    ("[trainer]\nepochs = 0", {}, "trainer.epochs", "0"),
    ('[trainer]\nepochs = "many"', {}, "trainer.epochs", "many"),
    ("[redis]\ntimeout_s = -1", {}, "redis.timeout_s", "-1"),
    ('redis = "redis://h"', {}, "redis", "redis://h"),
    ('[trainer]\ncompute = "int8"', {}, "trainer.compute", "int8"),
    ("", {"MUSTER_TRAINER__EPOCHS": "0"}, "trainer.epochs", "0"),
    ("", {"MUSTER_TELEMETRY__LOG_LEVEL": "loud"}, "telemetry.log_level", "loud"),
    ("", {"MUSTER_MODEL": "folder"}, "model", "folder"),
]


@pytest.mark.parametrize(("text", "environ", "field", "value"), BAD_VALUES)
def test_a_wrong_value_names_field_value_and_way_out(
    tmp_path: Path, text: str, environ: dict[str, str], field: str, value: str
) -> None:
    error = refused(tmp_path, text, **environ)
    assert (error.field, error.value) == (field, value)
    assert error.problem
    assert error.way_out


def test_the_way_out_of_a_wrong_value_is_the_help_of_its_field(tmp_path: Path) -> None:
    error = refused(tmp_path, "[telemetry]\nlog_level = 'loud'")
    assert error.way_out == "DEBUG, INFO, WARNING or ERROR."


FROM_THE_ENVIRONMENT = [
    {"MUSTER_TRAINER__EPOCHS": "0"},
    {"MUSTER_REDIS__TIMEOUT_S": "x"},
    {"MUSTER_GROUPS_PER_BATCH": "0"},
    {"MUSTER_RNU": "x"},
    {"MUSTER_REDIS__ULR": "x"},
    {"MUSTER_REDSI__URL": "x"},
]


@pytest.mark.parametrize("environ", FROM_THE_ENVIRONMENT)
def test_what_came_from_the_environment_says_so(tmp_path: Path, environ: dict[str, str]) -> None:
    [name] = environ
    assert f"(from the environment variable {name})" in refused(tmp_path, **environ).problem


def test_what_came_from_the_file_does_not_blame_the_environment(tmp_path: Path) -> None:
    error = refused(tmp_path, "[trainer]\nepochs = 0", MUSTER_TRAINER__SEED="1")
    assert "environment" not in error.problem


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file") as caught:
        load_config(tmp_path / "nowhere.toml", {})
    assert caught.value.value == str(tmp_path / "nowhere.toml")


@pytest.mark.parametrize("data", [b"run = ", b"\xff\xfe", b"[a]\n[a]\n"])
def test_a_file_that_is_no_toml_is_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "muster.toml"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(path, {})


def test_a_folder_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        load_config(tmp_path, {})
    assert caught.value.field == "--config"


def test_the_state_folder_is_absolute_and_knows_home(tmp_path: Path) -> None:
    assert load(tmp_path, "state_dir = '~/x'").state_dir == Path.home() / "x"


def test_every_field_explains_itself() -> None:
    """The docstring of a field is what an error shows as the way out."""
    config = load_config(None, {})
    kinds = [type(section) for section in config.sections.values()]
    silent = [
        f"{kind.__name__}.{name}"
        for kind in kinds
        for name, info in kind.model_fields.items()
        if not info.description
    ]
    assert silent == []


def test_a_value_of_the_wrong_kind_says_what_to_write(tmp_path: Path) -> None:
    error = refused(tmp_path, '[sandbox]\nboxes_max = "many"\n')
    assert error.way_out.startswith("write a whole number: ")
