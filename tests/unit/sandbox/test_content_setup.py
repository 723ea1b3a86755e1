"""How a task's boxes are made: once with a snapshot where something runs or is copied."""

from __future__ import annotations

import pytest

from muster.archive import unpack
from muster.errors import InvalidInput
from muster.taskset import Task, task_from_archive
from services.sandbox.content import Setup, setup
from services.sandbox.environment import Enter
from tests.contract.hosts import package


def made(dockerfile: str, *, builds: bool = False, toml: str = "") -> Setup:
    archive = package(dockerfile=dockerfile, toml=toml)["archive"]
    task: Task = task_from_archive(archive, name="task")
    return setup(task, unpack(archive), "host", builds=builds)


def test_folders_and_variables_alone_need_no_snapshot() -> None:
    found = made("FROM scratch\nWORKDIR /job\nENV A=b\n")
    assert not found.snapshot
    assert (found.session.cwd, found.session.env["A"]) == ("/job", "b")


@pytest.mark.parametrize("line", ["RUN true", "COPY given.txt /given.txt"])
def test_what_runs_or_is_copied_is_done_once(line: str) -> None:
    assert made(f"FROM scratch\n{line}\n").snapshot


def test_an_image_builder_gets_the_folder_and_the_box_only_its_session() -> None:
    found = made("FROM scratch\nWORKDIR /job\nRUN true\n", builds=True)
    assert found.snapshot
    assert [type(action) for action in found.actions] == [Enter]
    assert sorted(found.context) == ["Dockerfile", "given.txt"]


def test_with_an_image_builder_a_session_is_what_the_task_says_beyond_its_image() -> None:
    dockerfile = "FROM scratch\nARG SUB=x\nWORKDIR /srv/$SUB\nENV A=b\n"
    assert made(dockerfile, builds=True).session == Enter("", {})
    toml = '[environment]\nworkdir = "/own"\n[environment.env]\nA = "c"\n'
    assert made(dockerfile, builds=True, toml=toml).session == Enter("/own", {"A": "c"})


def test_what_only_an_image_builder_can_do_is_refused_without_one() -> None:
    dockerfile = 'FROM scratch\nSHELL ["/bin/bash", "-c"]\nRUN true\n'
    with pytest.raises(InvalidInput) as caught:
        made(dockerfile)
    assert caught.value.field.startswith("environment/Dockerfile")
    assert made(dockerfile, builds=True).snapshot
