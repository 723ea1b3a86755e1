"""A Dockerfile and a task as actions on a box."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from muster.archive import TaskFile, pack_files
from muster.dockerfile import CopyFiles, RunCommand
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
    assert spec.env["PATH"] == "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    assert spec.env["HOME"] == "/tests"
    assert "ONE" not in spec.env
    assert environment.bounded(spec, 5.0).timeout_s == 5.0


def test_the_verifier_is_told_where_the_tests_are(task: Task, files: dict[str, TaskFile]) -> None:
    spec = environment.judge_spec(task, files, Limits())
    assert spec.env["TEST_DIR"] == "/tests"
    assert not spec.live


def test_a_script_beside_the_tests_is_put_among_them(
    task: Task, files: dict[str, TaskFile]
) -> None:
    files["run-tests.sh"] = TaskFile(0o755, b"pytest $TEST_DIR")
    other = replace(task, test_script="run-tests.sh", verify="live")
    spec = environment.judge_spec(other, files, Limits())
    [script] = [file for file in spec.files if file.path == spec.script]
    assert (script.data, script.mode, spec.live) == (b"pytest $TEST_DIR", 0o755, True)
    assert spec.script.startswith("/tests/")
    assert {f.path for f in spec.files} >= {"/tests/test.sh", "/tests/data/in.txt"}


def test_a_task_that_only_an_image_builder_can_make_is_refused_elsewhere(task: Task) -> None:
    other = replace(task, unbuildable="file line 4: ARG is not supported")
    environment.check(other, builds=True)
    environment.check(task, builds=False)
    with pytest.raises(InvalidInput, match="ARG is not supported") as caught:
        environment.check(other, builds=False)
    assert caught.value.field == "file line 4"
    assert "docker" in caught.value.way_out


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PATH", "/opt/venv/bin:/usr/bin"),
        ("PATH", "/usr/bin:"),
        ("PATH", "bin:/usr/bin"),
        ("PATH", "/usr/../app/bin"),
        ("PATH", "/usrlocal/bin"),
        ("PATH", ""),
        ("PATH", "/"),
        ("PYTHONPATH", "/app"),
        ("LD_LIBRARY_PATH", "/usr/lib:/srv/lib"),
        ("LD_PRELOAD", "/usr/lib/one.so /tmp/two.so"),
        ("BASH_ENV", "/root/.bashrc"),
    ],
)
def test_a_verifier_whose_tools_the_agent_could_bring_is_refused_by_name(
    name: str, value: str, task: Task
) -> None:
    other = replace(task, verifier_env=(("CHECK", "/app"), (name, value)))
    for builds in (False, True):
        with pytest.raises(InvalidInput, match="agent can put its own") as caught:
            environment.check(other, builds=builds)
        assert (caught.value.field, caught.value.value) == (f"verifier.env.{name}", value)
        assert "/usr" in caught.value.way_out


def test_a_verifier_may_take_tools_from_what_the_box_started_from_and_from_its_tests(
    task: Task,
) -> None:
    env = (
        ("PATH", "/usr/local/cargo/bin:/usr/bin:/bin"),
        ("PYTHONPATH", "/tests/lib"),
        ("LD_PRELOAD", "/usr/lib/one.so /lib64/two.so"),
        ("DATA", "/app"),
    )
    environment.check(replace(task, verifier_env=env), builds=False)


def test_content_is_of_what_is_prepared_and_of_nothing_else(
    task: Task, files: dict[str, TaskFile]
) -> None:
    once = environment.content(task, files)
    assert len(once) == 64
    renamed = replace(task, name="other", digest="0" * 64, verifier_timeout_s=3.0, cpus=1.0)
    elsewhere = files | {"tests/test.sh": TaskFile(0o644, b"exit 1")}
    assert environment.content(renamed, elsewhere) == once
    assert environment.content(task, files, builds=True) != once


@pytest.mark.parametrize(
    "change",
    [
        {"env": (("MOOD", "wild"),)},
        {"workdir": "/c"},
        {"base": "ubuntu:24.04"},
        {"build": (RunCommand("true"),)},
        {"build": ()},
        {"build": (CopyFiles("tool.sh", "/a/", None),)},
    ],
)
def test_what_prepares_a_box_otherwise_is_other_content(
    change: dict[str, Any], task: Task, files: dict[str, TaskFile]
) -> None:
    once = environment.content(task, files)
    assert environment.content(replace(task, **change), files) != once


def test_a_copied_file_and_the_base_are_part_of_the_content(
    task: Task, files: dict[str, TaskFile]
) -> None:
    once = environment.content(task, files)
    for mode, data in ((0o644, b"echo other"), (0o755, b"echo tool")):
        changed = files | {"environment/tool.sh": TaskFile(mode, data)}
        # The line says --chmod=755, so a file's own mode does not count.
        assert (environment.content(task, changed) == once) is (data == b"echo tool")
    assert environment.content(task, files, "sha256:1") != environment.content(
        task, files, "sha256:2"
    )
    unused = files | {"environment/unused": TaskFile(0o644, b"x")}
    assert environment.content(task, unused) == once
    assert environment.content(task, unused, builds=True) != environment.content(
        task, files, builds=True
    )


def test_parts_of_the_content_do_not_run_into_each_other(
    task: Task, files: dict[str, TaskFile]
) -> None:
    split = [
        replace(task, build=(RunCommand("a"), RunCommand("b"))),
        replace(task, build=(RunCommand("ab"),)),
        replace(task, build=(RunCommand("b"), RunCommand("a"))),
    ]
    assert len({environment.content(each, files) for each in split}) == 3


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
