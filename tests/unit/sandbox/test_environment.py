"""A Dockerfile and a task as actions on a box."""

from __future__ import annotations

import pytest

from muster.archive import TaskFile, pack_files
from muster.errors import InvalidInput
from muster.taskset import Task, task_from_archive
from muster.types import Limits
from services.sandbox import environment, limits
from services.sandbox.environment import Enter, Put, RunSetup

TEXTS = {
    "instruction.md": "Do it.",
    "task.toml": '[environment]\nenv = {MOOD = "calm"}\n[verifier]\nenv = {CHECK = "1"}\n',
    "environment/Dockerfile": (
        "FROM scratch\nWORKDIR /a\nENV ONE=1\nCOPY --chmod=755 tool.sh bin/\n"
        "RUN ./bin/tool.sh 'x y'\nWORKDIR /b\n"
    ),
    "environment/tool.sh": "echo tool",
    "tests/test.sh": "exit 0",
    "tests/data/in.txt": "in",
}


@pytest.fixture
def files() -> dict[str, TaskFile]:
    return {path: TaskFile(0o644, text.encode()) for path, text in TEXTS.items()}


@pytest.fixture
def task(files: dict[str, TaskFile]) -> Task:
    return task_from_archive(pack_files(files))


def test_the_dockerfile_s_lines_become_actions_in_order(
    task: Task, files: dict[str, TaskFile]
) -> None:
    done = environment.actions(task, files)
    assert [type(action) for action in done] == [Enter, Put, Enter, RunSetup, Enter, Enter]
    [_, put, before, run, _, last] = done
    assert isinstance(put, Put)
    assert [(f.path, f.mode, f.data) for f in put.files] == [
        ("/a/bin/tool.sh", 0o755, b"echo tool")
    ]
    assert isinstance(before, Enter)
    assert (before.cwd, before.env["ONE"]) == ("/a", "1")
    assert "MOOD" not in before.env
    assert isinstance(run, RunSetup)
    assert run.command == """exec /bin/sh -c './bin/tool.sh '"'"'x y'"'"''"""
    assert isinstance(last, Enter)
    assert (last.cwd, last.env["ONE"], last.env["MOOD"]) == ("/b", "1", "calm")


def test_nothing_of_the_tests_enters_the_agent_s_box(
    task: Task, files: dict[str, TaskFile]
) -> None:
    puts = [action for action in environment.actions(task, files) if isinstance(action, Put)]
    assert not [f for put in puts for f in put.files if f.data in (b"exit 0", b"in")]


def test_the_verifier_gets_the_tests_and_a_clean_environment(
    task: Task, files: dict[str, TaskFile]
) -> None:
    spec = environment.judge_spec(task, files, Limits())
    assert {f.path for f in spec.files} == {"/tests/test.sh", "/tests/data/in.txt"}
    assert (spec.script, spec.cwd, spec.env["CHECK"]) == ("/tests/test.sh", "/b", "1")
    assert spec.env["PATH"] == "/usr/bin:/bin"
    assert "ONE" not in spec.env
    assert environment.bounded(spec, 5.0).timeout_s == 5.0


def test_limits_take_the_caller_s_figure_then_the_task_s() -> None:
    most = Limits(1 << 30, 100, 1 << 30, 10_000, 1 << 20)
    asked = Limits(0, 7, 0, 0, 0)
    got = limits.resolve(asked, limits.of_task(64 << 20, None), most)
    assert got == Limits(64 << 20, 7, 32 << 20, 4096, 4096)


@pytest.mark.parametrize("asked", [Limits(pids=101), Limits(pids=-1), Limits(memory_bytes=1)])
def test_limits_out_of_bounds_are_refused_by_name(asked: Limits) -> None:
    most = Limits(1 << 30, 100, 1 << 30, 10_000, 1 << 20)
    with pytest.raises(InvalidInput) as caught:
        limits.resolve(asked, Limits(), most)
    assert caught.value.field in ("limits.pids", "limits.memory_bytes")
