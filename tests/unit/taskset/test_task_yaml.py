"""A folder of Terminal-Bench 1 becomes a Task, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from muster.dockerfile import CopyFiles, SetWorkdir
from muster.errors import InvalidInput
from muster.task_yaml import examine, examine_compose, solution_script
from muster.taskset import environment_files, pack, read_task, task_folders, unpack

FILES = {
    "task.yaml": "instruction: Sort it.\ndifficulty: easy\n",
    "Dockerfile": "FROM t-bench/python-3-13\nWORKDIR /app\nCOPY data ./\n",
    "data/in.txt": "b\na\n",
    "run-tests.sh": "pytest -rA $TEST_DIR\n",
    "tests/test_outputs.py": "def test_it(): pass\n",
    "solution.sh": "sort in.txt > out.txt\n",
    "wrong.sh": "cp in.txt out.txt\n",
}
COMPOSE = """
services:
  client:
    build:
      dockerfile: Dockerfile
    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}
    container_name: ${T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME}
    command: [ "sh", "-c", "sleep infinity" ]
    environment:
      - TEST_DIR=${T_BENCH_TEST_DIR}
      - MODE=${MODE:-calm}
    volumes:
      - ${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}
      - ${T_BENCH_TASK_AGENT_LOGS_PATH}:${T_BENCH_CONTAINER_AGENT_LOGS_PATH}
"""
MakeBench = Callable[..., Path]


@pytest.fixture
def make_bench(tmp_path: Path) -> MakeBench:
    """`make_bench({"path": "content" or None to leave it out})` → the folder."""

    def make(changes: dict[str, str | None] | None = None, name: str = "sort-it") -> Path:
        folder = tmp_path / "set" / name
        for relative, content in {**FILES, **(changes or {})}.items():
            if content is not None:
                path = folder / relative
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content, encoding="utf-8")
        return folder

    return make


def test_a_plain_folder_gives_its_instruction_steps_and_the_format_s_defaults(
    make_bench: MakeBench,
) -> None:
    task = read_task(make_bench())
    assert (task.name, task.instruction, task.workdir) == ("sort-it", "Sort it.", "/app")
    assert task.build == (SetWorkdir("/app"), CopyFiles("data", "/app/"))
    assert (task.agent_timeout_s, task.verifier_timeout_s) == (360.0, 60.0)
    assert (task.test_script, task.verdict) == ("tests/run-tests.sh", "pytest")
    assert task.base == "t-bench/python-3-13"
    assert dict(task.verifier_env) == {"TEST_DIR": "/tests"}


def test_its_files_lie_in_the_archive_as_those_of_any_task_do(make_bench: MakeBench) -> None:
    files = unpack(pack(make_bench({"docker-compose.yaml": COMPOSE, ".git/config": "no"})))
    assert set(files) == {
        "environment/Dockerfile",
        "environment/data/in.txt",
        "environment/docker-compose.yaml",
        "task.yaml",
        "tests/run-tests.sh",
        "tests/test_outputs.py",
    }
    assert "data/in.txt" in environment_files(files)


def test_copy_sees_neither_tests_nor_solutions(make_bench: MakeBench) -> None:
    for path in ("tests", "run-tests.sh", "solution.sh", "task.yaml"):
        with pytest.raises(InvalidInput, match="no such file") as caught:
            read_task(make_bench({"Dockerfile": f"FROM x\nCOPY {path} /app/\n"}))
        assert "solutions never count" in caught.value.way_out


def test_times_that_are_given_are_taken(make_bench: MakeBench) -> None:
    told = "max_agent_timeout_sec: 30\nmax_test_timeout_sec: 7.5\n"
    task = read_task(make_bench({"task.yaml": FILES["task.yaml"] + told}))
    assert (task.agent_timeout_s, task.verifier_timeout_s) == (30.0, 7.5)


def test_a_folder_of_both_formats_at_once_is_refused(make_bench: MakeBench) -> None:
    with pytest.raises(InvalidInput, match="of one format"):
        read_task(make_bench({"task.toml": ""}))


def test_two_files_that_would_be_one_are_refused(make_bench: MakeBench) -> None:
    with pytest.raises(InvalidInput, match="are one"):
        read_task(make_bench({"tests/run-tests.sh": "true"}))


@pytest.mark.parametrize("missing", ["run-tests.sh", "Dockerfile"])
def test_a_folder_without_a_needed_file_is_refused_by_its_name(
    make_bench: MakeBench, missing: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_task(make_bench({missing: None}))
    assert (caught.value.value, missing in caught.value.way_out) == (missing, True)


def test_a_line_is_named_as_the_format_names_its_file(make_bench: MakeBench) -> None:
    task = read_task(make_bench({"Dockerfile": "FROM x\nADD a /\n"}))
    assert task.unbuildable.startswith("Dockerfile line 2: ADD")


def test_a_set_may_hold_both_formats(make_bench: MakeBench, tmp_path: Path) -> None:
    make_bench()
    assert [path.name for path in task_folders(tmp_path / "set")] == ["sort-it"]
    assert task_folders(tmp_path / "set" / "sort-it") == [tmp_path / "set" / "sort-it"]


@pytest.mark.parametrize(
    ("told", "field"),
    [
        ("parser_name: swebench", "parser_name"),
        ("run_tests_in_same_shell: true", "run_tests_in_same_shell"),
        ("max_agent_timeout_sec: .inf", "max_agent_timeout_sec"),
        ("max_test_timeout_sec: soon", "max_test_timeout_sec"),
        ("max_test_timeout: 5", "max_test_timeout"),
        ("tags: &a [x]\ncategory: *a", "task.yaml"),
        ("difficulty: hard", "task.yaml.difficulty"),
        ("author_name: !!python/object:os.system {}", "task.yaml"),
        ("tags: " + "[" * 3000, "task.yaml"),
        ("- one", "task.yaml"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name(told: str, field: str) -> None:
    _, found = examine(FILES["task.yaml"] + told)
    assert [refusal.field for refusal in found.refusals] == [field]
    assert found.refusals[0].way_out


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("difficulty: easy", ["instruction"]),
        ("instruction: Do it.", ["difficulty"]),
        ("instruction: Do it.\ndifficulty: soft", ["difficulty"]),
        ("instruction: 3\ndifficulty: easy", ["instruction"]),
        ("", ["task.yaml"]),
    ],
)
def test_what_has_to_be_said_is_missed_by_its_name(text: str, fields: list[str]) -> None:
    _, found = examine(text)
    assert [refusal.field for refusal in found.refusals] == fields


def test_the_nearest_name_is_told() -> None:
    _, found = examine(FILES["task.yaml"] + "max_agent_timeout: 5")
    assert found.refusals[0].way_out == "did you mean 'max_agent_timeout_sec'?"


def test_the_standard_form_of_compose_is_one_box() -> None:
    env, found = examine_compose(COMPOSE)
    assert not found.refusals
    assert env == (("MODE", "calm"), ("TEST_DIR", "/tests"))


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("  client:", "  server: {}\n  client:", "services"),
        ("services:", "networks: {}\nservices:", "networks"),
        ("    image:", "    privileged: true\n    image:", "services.client.privileged"),
        ("dockerfile: Dockerfile", "dockerfile: Other", "services.client.build"),
        ("dockerfile: Dockerfile", "args: {A: b}", "services.client.build"),
        ("MODE=${MODE:-calm}", "MODE", "services.client.environment.MODE"),
        ("- MODE=${MODE:-calm}", "- 3", "services.client.environment.3"),
        (
            "      - TEST_DIR=${T_BENCH_TEST_DIR}\n      - MODE=${MODE:-calm}",
            "      5",
            "services.client.environment",
        ),
        ("sleep infinity", "nginx", "services.client.command"),
        ("${T_BENCH_TASK_LOGS_PATH}", "/etc", "services.client.volumes"),
        ("${MODE:-calm}", "${MODE}", "services.client.environment.MODE"),
        ("    image:", "    network_mode: host\n    image:", "services.client.network_mode"),
    ],
)
def test_any_other_container_is_refused_by_name(old: str, new: str, field: str) -> None:
    assert old in COMPOSE
    _, found = examine_compose(COMPOSE.replace(old, new, 1))
    assert [refusal.field for refusal in found.refusals] == [field]


def test_compose_s_variables_reach_the_box(make_bench: MakeBench) -> None:
    task = read_task(make_bench({"docker-compose.yaml": COMPOSE}))
    assert dict(task.env)["MODE"] == "calm"


def test_a_solution_in_yaml_is_its_commands_in_order() -> None:
    text = "- command: cd /app\n  block: true\n- command: sort in.txt > out.txt\n"
    assert solution_script(text) == "cd /app\nsort in.txt > out.txt\n"


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("- command: i\n  append_enter: false", "solution.yaml[1].append_enter"),
        ("- command: ls\n- comand: ls", "solution.yaml[2]"),
        ("- command: ls\n  wait: 1", "solution.yaml[1].wait"),
        ("command: ls", "solution.yaml[1]"),
    ],
)
def test_a_solution_that_is_no_script_is_refused(text: str, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        solution_script(text)
    assert caught.value.field == field
