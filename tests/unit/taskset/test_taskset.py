"""A Harbor folder becomes a Task, or is refused with the field and the way out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.dockerfile import CopyFiles, SetWorkdir
from muster.errors import InvalidInput
from muster.taskset import (
    environment_files,
    examine,
    pack,
    read_task,
    read_task_set,
    solution_env,
    task_from_archive,
    unpack,
)

MakeTask = Callable[..., Path]


def test_a_plain_folder_gives_its_instruction_steps_and_harbor_defaults(make_task: MakeTask):
    task = read_task(make_task())
    assert (task.name, task.instruction, task.workdir) == (
        "muster/hello",
        "Create hello.txt.",
        "/app",
    )
    assert task.build == (SetWorkdir("/app"), CopyFiles("a.txt", "/app/"))
    assert (task.agent_timeout_s, task.verifier_timeout_s) == (None, 600.0)
    assert (task.success_threshold, task.max_turns) == (1.0, None)
    assert task.digest == hashlib.sha256(task.archive).hexdigest()


def test_settings_of_task_toml_arrive_in_the_task(make_task: MakeTask):
    toml = """
    schema_version = "1.4"
    [metadata]
    author = "anyone"
    muster_max_turns = 3
    muster_success_threshold = 0.5
    [agent]
    timeout_sec = 60
    [verifier]
    timeout_sec = 5.5
    env = {B = "2", A = "1"}
    [environment]
    network_mode = "no-network"
    workdir = "/srv"
    memory_mb = 64
    cpus = 2
    storage = "1G"
    env = {LANG = "C"}
    """
    task = read_task(make_task("named-by-folder", {"task.toml": toml}))
    assert task.name == "named-by-folder"
    assert (task.max_turns, task.success_threshold) == (3, 0.5)
    assert (task.agent_timeout_s, task.verifier_timeout_s) == (60.0, 5.5)
    assert (task.cpus, task.base, task.verify) == (2.0, "muster/host-base", "sealed")
    assert (task.memory_bytes, task.disk_bytes, task.workdir) == (64 << 20, 1 << 30, "/srv")
    assert (task.env, task.verifier_env) == ((("LANG", "C"),), (("A", "1"), ("B", "2")))


def test_what_was_packed_reads_the_same_without_the_folder(make_task: MakeTask):
    task = read_task(make_task())
    assert task_from_archive(task.archive) == task


def test_the_solution_stays_at_home_unless_asked_for(make_task: MakeTask):
    folder = make_task()
    assert not any(path.startswith("solution") for path in unpack(read_task(folder).archive))
    assert "solution/solve.sh" in unpack(pack(folder, with_solution=True))


def test_a_set_is_its_subfolders_in_order_of_name(make_task: MakeTask):
    for name in ("b", "a", "_draft", ".git"):
        root = make_task(name, {"task.toml": ""}).parent
    (root / "README.md").write_text("about these tasks")
    assert [task.name for task in read_task_set(root)] == ["a", "b"]


def test_a_single_task_folder_is_a_set_of_one(make_task: MakeTask):
    assert [task.name for task in read_task_set(make_task())] == ["muster/hello"]


def test_two_tasks_of_one_name_are_refused(make_task: MakeTask):
    make_task("a")
    with pytest.raises(InvalidInput, match="two tasks are named 'muster/hello'"):
        read_task_set(make_task("b").parent)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: path / "absent", "no such folder"),
        (lambda path: path, "holds no task"),
    ],
)
def test_a_path_without_tasks_is_refused(
    tmp_path: Path, make: Callable[[Path], Path], problem: str
):
    with pytest.raises(InvalidInput, match=problem) as caught:
        read_task_set(make(tmp_path))
    assert (caught.value.field, "tests/test.sh" in caught.value.way_out) == ("task_set", True)


@pytest.mark.parametrize(
    ("missing", "way_out"),
    [
        ("tests/test.sh", "add tests/test.sh"),
        ("instruction.md", "add instruction.md"),
        ("environment/Dockerfile", "add environment/Dockerfile"),
    ],
)
def test_a_folder_without_a_needed_file_is_refused_by_its_name(
    make_task: MakeTask, missing: str, way_out: str
):
    folder = make_task("broken", {missing: None})
    with pytest.raises(InvalidInput) as caught:
        read_task(folder)
    assert caught.value.value == missing
    assert caught.value.way_out.startswith(way_out)
    assert "broken" in str(caught.value)


def test_a_file_that_copy_misses_is_told_when_the_task_is_read(make_task: MakeTask):
    with pytest.raises(InvalidInput, match="no such file beside the Dockerfile") as caught:
        read_task(make_task("hello", {"environment/a.txt": None}))
    assert caught.value.value == "a.txt"


def test_an_image_alone_is_a_dockerfile_of_one_line(make_task: MakeTask):
    toml = "[environment]\ndocker_image = 'team/image:2'\nworkdir = '/w'"
    task = read_task(make_task("hello", {"task.toml": toml, "environment/Dockerfile": None}))
    assert (task.base, task.workdir, task.build) == ("team/image:2", "/w", ())
    assert environment_files(unpack(task.archive))["Dockerfile"].data == b"FROM team/image:2\n"


def test_a_dockerfile_stands_before_its_prebuilt_image(make_task: MakeTask):
    folder = make_task("hello", {"task.toml": "[environment]\ndocker_image = 'built:1'"})
    seen = examine(folder)
    assert seen.task is not None
    assert (seen.task.base, len(seen.task.build)) == ("muster/host-base", 2)
    assert [remark.field for remark in seen.remarks] == ["environment.docker_image"]


@pytest.mark.parametrize(
    ("changes", "line", "why"),
    [
        ({"environment/Dockerfile": "FROM x\nADD a /"}, "line 2", "ADD is not supported"),
        ({"environment/.dockerignore": "*.md\n"}, "line 1", ".dockerignore"),
    ],
)
def test_what_only_a_builder_can_make_is_read_and_told_by_line(
    make_task: MakeTask, changes: dict[str, str | None], line: str, why: str
):
    task = read_task(make_task("hello", changes))
    assert task.build == ()
    assert task.unbuildable.startswith(f"environment/Dockerfile {line}: ")
    assert why in task.unbuildable


def test_a_task_that_every_host_can_make_says_so(make_task: MakeTask):
    assert read_task(make_task()).unbuildable == ""


def test_an_examination_tells_all_of_a_folder(make_task: MakeTask):
    toml = "artifacts = ['x']\n[environment]\ngpus = 1\nbuild_timeout_sec = 9"
    docker = "FROM x\nEXPOSE 80\n"
    seen = examine(make_task("hello", {"task.toml": toml, "environment/Dockerfile": docker}))
    assert seen.task is None
    assert [refusal.field for refusal in seen.refusals] == ["artifacts", "environment.gpus"]
    assert [remark.field for remark in seen.remarks] == [
        "environment.build_timeout_sec",
        "environment/Dockerfile line 2: EXPOSE",
    ]


def test_the_solution_has_variables_of_its_own(make_task: MakeTask):
    folder = make_task("hello", {"task.toml": "[solution]\nenv = {A = '${B:-c}'}"})
    assert solution_env(folder) == {"A": "c"}
    assert read_task(folder).env == ()


def test_several_containers_are_refused(make_task: MakeTask):
    with pytest.raises(InvalidInput, match="several containers"):
        read_task(make_task("hello", {"environment/docker-compose.yaml": "services: {}"}))


@pytest.mark.parametrize("name", ["", "-x", "a b", "../up", "a/b/c", "x" * 65])
def test_a_name_that_could_not_be_a_key_or_path_is_refused(make_task: MakeTask, name: str):
    archive = pack(make_task("hello", {"task.toml": ""}))
    with pytest.raises(InvalidInput, match="task name"):
        task_from_archive(archive, name=name)


def test_a_set_names_all_of_its_tasks_that_are_refused(make_task: MakeTask):
    make_task("good")
    make_task("gpu", {"task.toml": "[environment]\ngpus = 1"})
    folder = make_task("typo", {"environment/Dockerfile": "FROM x\nRUM true\n"})
    with pytest.raises(InvalidInput) as caught:
        read_task_set(folder.parent)
    told = str(caught.value)
    assert "2 tasks are refused: gpu: environment.gpus: " in told
    assert "; typo: environment/Dockerfile line 2: " in told
    assert "muster tasks check" in caught.value.way_out


def test_one_task_that_is_refused_keeps_its_field_and_way_out(make_task: MakeTask):
    folder = make_task("gpu", {"task.toml": "[environment]\ngpus = 1"})
    with pytest.raises(InvalidInput, match=r"task gpu: ") as caught:
        read_task_set(folder.parent)
    assert caught.value.field == "environment.gpus"
    assert caught.value.way_out.startswith("write the task for processors; ")


def test_a_task_without_a_dockerfile_may_name_its_image(make_task: MakeTask):
    with pytest.raises(InvalidInput) as caught:
        read_task(make_task("hello", {"environment/Dockerfile": None}))
    assert "docker_image" in caught.value.way_out


def test_copy_of_what_is_missing_names_its_line(make_task: MakeTask):
    text = "FROM x\nWORKDIR /app\nCOPY none.txt .\nCOPY also.txt .\n"
    seen = examine(make_task("hello", {"environment/Dockerfile": text}))
    assert [(one.field, one.value) for one in seen.refusals] == [
        ("environment/Dockerfile line 3", "none.txt"),
        ("environment/Dockerfile line 4", "also.txt"),
    ]
