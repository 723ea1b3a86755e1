"""What a person gets wrong is one line: field, value, problem, way out; exit status 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.cli.main import main
from muster.cli.up import finish
from muster.supervisor import Ended


class Shell:
    """Runs `muster`; its exit status and what stands on stderr."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd

    def fails(self, *arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        said = self._capfd.readouterr().err.strip()
        assert "\n" not in said, "a person gets one line"
        return said


@pytest.fixture
def muster(capfd: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capfd)


def _config(folder: Path, text: str) -> str:
    path = folder / "muster.toml"
    path.write_text(f'state_dir = "{folder / "state"}"\n{text}')
    return str(path)


def _task(folder: Path) -> Path:
    task = folder / "a-task"
    for name in ("tests", "environment"):
        (task / name).mkdir(parents=True)
    (task / "instruction.md").write_text("Do it.\n")
    (task / "task.toml").write_text("")
    (task / "tests" / "test.sh").write_text("true\n")
    (task / "environment" / "Dockerfile").write_text("FROM debian\n")
    return task


def test_an_unknown_key_is_named_with_the_nearest_one(muster: Shell, tmp_path: Path) -> None:
    config = _config(tmp_path, "[router]\nlisten_to = 'x'\n")
    said = muster.fails("up", "--dry-run", "--config", config)
    assert said == "router.listen_to = 'x': unknown key → did you mean 'router.listen'?"


def test_a_missing_model_folder_is_named(muster: Shell, tmp_path: Path) -> None:
    config = _config(tmp_path, "[model]\npath = '/no/such/model'\n")
    said = muster.fails("demo", "--config", config, "--tasks", str(_task(tmp_path)))
    assert said.startswith("model.path = '/no/such/model': there is no such model folder → give")


def test_a_server_that_cannot_be_reached_is_named(muster: Shell, tmp_path: Path) -> None:
    config = _config(tmp_path, "[redis]\nurl = 'redis://127.0.0.1:1'\n")
    said = muster.fails("up", "--config", config)
    assert said.startswith("redis.url = 'redis://127.0.0.1:1': Redis cannot be reached")
    assert "→ start it or correct the address" in said


def test_a_task_folder_without_tests_is_named(muster: Shell, tmp_path: Path) -> None:
    task = _task(tmp_path)
    (task / "tests" / "test.sh").unlink()
    said = muster.fails("submit", str(task), "--router", "127.0.0.1:1")
    assert "tests/test.sh" in said
    assert "→ add tests/test.sh" in said


def test_a_group_of_one_is_refused(muster: Shell, tmp_path: Path) -> None:
    said = muster.fails("submit", str(_task(tmp_path)), "--group-size", "1")
    assert said.startswith("group_size = '1': must be at least 2 → use 2 or more")


def test_a_task_that_cannot_be_checked_is_named(muster: Shell, tmp_path: Path) -> None:
    said = muster.fails("tasks", "check", str(tmp_path / "absent"))
    assert "there is no such folder" in said
    assert "→ name a task folder" in said


def test_a_configuration_file_that_is_not_there_is_named(muster: Shell, tmp_path: Path) -> None:
    said = muster.fails("up", "--config", str(tmp_path / "none.toml"))
    assert "--config" in said
    assert "there is no such file" in said


def test_a_failed_start_leaves_no_runtime_folder(muster: Shell, tmp_path: Path) -> None:
    from muster.supervise.state import read, runtime_dir

    muster.fails("up", "--config", _config(tmp_path, "[redis]\nurl = 'redis://127.0.0.1:1'\n"))
    assert not runtime_dir(tmp_path / "state").exists()
    assert read(tmp_path / "state") is None


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--policy", "zero_variance=drop"), "policy.zero_variance = 'drop': not a value of this"),
        (
            ("--policy", "valid_min=9"),
            "policy.valid_min = '9': not a value of this policy → choose",
        ),
        (("--temperature", "-1"), "sampling.temperature = '-1.0': not a sampling temperature →"),
        (("--instances", "-4"), "instances = '-4': not a seed → count from 0"),
        (("--instances", "-4", "--split", "eval"), "instances = '-4': not a seed → count from 0"),
    ],
)
def test_a_wrong_wish_is_told_without_a_router(
    muster: Shell, tmp_path: Path, options: tuple[str, ...], told: str
) -> None:
    task = _task(tmp_path)
    if "eval" in options:
        (task / "task.toml").write_text('[metadata]\nmuster_split = "eval"\n')
    said = muster.fails("submit", str(task), "--router", "127.0.0.1:1", *options)
    assert said.splitlines()[-1].startswith(told)


@pytest.mark.parametrize("command", [("up", "--dry-run"), ("up",)])
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[model]\npath = '/nope'\n", "model.path = '/nope': there is no such model folder"),
        ("[redis]\nurl = 'foo'\n", "redis.url = 'foo': not the address of a Redis server"),
        ("[router]\nlisten = '7400'\n", "router.listen = '7400': not an address → write HOST:PORT"),
        ("[router]\nlisten = ':7400'\n", "router.listen = ':7400': not an address"),
        ("[trainer]\nlisten = 'h:70000'\n", "trainer.listen = 'h:70000': not an address"),
    ],
)
def test_a_dry_run_refuses_what_a_start_refuses(
    muster: Shell, tmp_path: Path, command: tuple[str, ...], text: str, told: str
) -> None:
    assert muster.fails(*command, "--config", _config(tmp_path, text)).startswith(told)


def test_a_dry_run_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["up", "--dry-run", "--config", _config(tmp_path, "")])
    assert ended.value.code == 0
    assert not (tmp_path / "state").exists()


def test_without_the_trainer_all_others_are_started(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["up", "--dry-run", "--without", "trainer", "--config", _config(tmp_path, "")])
    started = [line for line in capfd.readouterr().out.splitlines() if "# would start" in line]
    names = [line.split()[3].rstrip(":") for line in started]
    assert names == ["redis", "sandbox", "inference", "readybank", "router"]


@pytest.mark.parametrize("name", ["coach", "router", "readybank"])
def test_what_no_other_can_stand_for_cannot_be_left_out(muster: Shell, name: str) -> None:
    said = muster.fails("up", "--dry-run", "--without", name)
    assert said.startswith(f"--without = '{name}': no service that can run elsewhere")


@pytest.mark.parametrize("command", ["watch", "cancel"])
def test_a_state_folder_where_nothing_runs_is_named(
    muster: Shell, tmp_path: Path, command: str
) -> None:
    said = muster.fails(command, "job-a", "--state-dir", str(tmp_path))
    assert said.startswith(f"state_dir = '{tmp_path}': no `muster up` runs with this state folder")


def test_a_folder_without_a_run_names_the_runs_below_it(muster: Shell, tmp_path: Path) -> None:
    for name in ("check", "demo", "replay"):
        (tmp_path / name / "redis" / "appendonlydir").mkdir(parents=True)
    said = muster.fails("report", "--state-dir", str(tmp_path))
    assert said.endswith(f"→ look below it: --state-dir {tmp_path / 'demo'}")


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        (Ended(0, "", interrupted=True), "everything is stopped; the run is kept in /kept\n"),
        (Ended(2, "router ended 5 times", interrupted=False), ""),
    ],
)
def test_an_end_that_was_asked_for_says_where_the_run_is(
    capsys: pytest.CaptureFixture[str], ended: Ended, said: str
) -> None:
    finish(ended, interrupted_status=0, kept=Path("/kept"))
    assert capsys.readouterr().out == said
