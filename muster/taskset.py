"""Read task sets: Harbor folders (instruction.md, task.toml, environment/, tests/).

Owns: what a task is once read, and every reason to refuse one. Promise: a folder and its archive
read the same; a setting that could change the task's meaning is honoured or refused by name,
never skipped. Does not cover: building or judging (the sandbox does), the tar (archive.py).
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from muster import task_toml
from muster.archive import TaskFile, pack, unpack
from muster.dockerfile import BuildStep, CopyFiles, Recipe, copied, parse
from muster.errors import InvalidInput
from muster.types import Value

__all__ = ["Task", "TaskFile", "pack", "read_task", "read_task_set", "task_from_archive", "unpack"]

INSTRUCTION_BYTES_MAX = 32 << 10
TASKS_MAX = 4096
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}(/[A-Za-z0-9][A-Za-z0-9._-]{0,63})?\Z")


class Task(Value, frozen=True):
    """One task, ready to travel. Times in seconds; None leaves the choice to the configuration."""

    name: str
    instruction: str
    digest: str  # sha256 of `archive`, hexadecimal
    archive: bytes
    workdir: str
    build: tuple[BuildStep, ...]
    env: tuple[tuple[str, str], ...] = ()  # of the box, over the Dockerfile's
    verifier_env: tuple[tuple[str, str], ...] = ()
    agent_timeout_s: float | None = None
    verifier_timeout_s: float = 600.0
    success_threshold: float = 1.0
    max_turns: int | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None


def read_task_set(path: Path) -> list[Task]:
    """The tasks at `path`: one task folder, or a folder of them, sorted by folder name.

    Files beside the task folders, and folders whose name starts with `.` or `_`, are not tasks.
    Raises InvalidInput (field `task_set`, or the field within the task that is wrong).
    """
    if not path.is_dir():
        raise _set_refusal("there is no such folder", path)
    if any((path / name).exists() for name in ("task.toml", "instruction.md", "tests")):
        return [read_task(path)]
    folders = sorted(p for p in path.iterdir() if p.is_dir() and p.name[0] not in "._")
    if not folders:
        raise _set_refusal("the folder holds no task", path)
    if len(folders) > TASKS_MAX:
        raise _set_refusal(f"more than {TASKS_MAX} tasks", path)
    tasks: dict[str, Task] = {}
    for folder in folders:
        task = read_task(folder)
        if task.name in tasks:
            raise _set_refusal(f"two tasks are named {task.name!r}", folder)
        tasks[task.name] = task
    return list(tasks.values())


def read_task(folder: Path) -> Task:
    """The task in `folder`; its name is `task.name` of task.toml, else the folder's own name.

    Raises InvalidInput, naming the folder, for what cannot be run here.
    """
    if not folder.is_dir():
        raise _set_refusal("there is no such task folder", folder)
    try:
        return task_from_archive(pack(folder), name=folder.resolve().name)
    except InvalidInput as error:
        problem = f"task folder {folder}: {error.problem}"
        raise InvalidInput(
            problem, field=error.field, value=error.value, way_out=error.way_out
        ) from error


def task_from_archive(archive: bytes, *, name: str = "task") -> Task:
    """The task packed in `archive`; `name` is used when its task.toml gives none. Pure."""
    files = unpack(archive)
    if "tests/test.sh" not in files:
        raise _refusal(
            "the task has no tests/test.sh, so nothing could judge it",
            "tests/test.sh",
            "add tests/test.sh, which writes a number from 0 to 1 to /logs/verifier/reward.txt",
        )
    instruction = _text(files, "instruction.md", INSTRUCTION_BYTES_MAX).strip()
    if not instruction:
        way_out = "add instruction.md, which tells the agent what to do"
        raise _refusal("the task has no instruction", "instruction.md", way_out)
    settings = task_toml.parse(_text(files, "task.toml", INSTRUCTION_BYTES_MAX))
    recipe = _recipe(files)
    return Task(
        name=_checked_name(settings.name or name),
        instruction=instruction,
        digest=hashlib.sha256(archive).hexdigest(),
        archive=archive,
        workdir=settings.workdir or recipe.workdir,
        build=recipe.steps,
        env=settings.env,
        verifier_env=settings.verifier_env,
        agent_timeout_s=settings.agent_timeout_s,
        verifier_timeout_s=settings.verifier_timeout_s,
        success_threshold=settings.success_threshold,
        max_turns=settings.max_turns,
        memory_bytes=settings.memory_bytes,
        disk_bytes=settings.disk_bytes,
    )


def environment_files(files: dict[str, TaskFile]) -> dict[str, TaskFile]:
    """The files below environment/ by their path there: what COPY can see."""
    prefix = "environment/"
    return {path[len(prefix) :]: f for path, f in files.items() if path.startswith(prefix)}


def _recipe(files: dict[str, TaskFile]) -> Recipe:
    compose = ("environment/docker-compose.yaml", "environment/docker-compose.yml")
    if found := [path for path in compose if path in files]:
        way_out = "describe one container with environment/Dockerfile"
        raise _refusal("tasks of several containers cannot be run", found[0], way_out)
    if "environment/Dockerfile" not in files:
        way_out = "add environment/Dockerfile (FROM, WORKDIR, COPY, RUN are enough)"
        raise _refusal("the task has no environment/Dockerfile", "environment/Dockerfile", way_out)
    recipe = parse(_text(files, "environment/Dockerfile", 1 << 16))
    context = environment_files(files)
    for step in recipe.steps:
        if isinstance(step, CopyFiles):
            copied(step, context)  # a missing file is told now, not in a box later
    return recipe


def _text(files: dict[str, TaskFile], path: str, limit: int) -> str:
    data = files[path].data if path in files else b""
    if len(data) > limit:
        raise _refusal(f"{path} is over {limit} bytes", path, "make it shorter")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _refusal(f"{path} is not UTF-8: {error.reason}", path, "save it as UTF-8") from None


def _checked_name(name: str) -> str:
    if not _NAME.match(name):
        way_out = "use letters, digits, '.', '_' and '-', at most one '/': for example team/my-task"
        raise InvalidInput(
            "not usable as a task name", field="task.name", value=name, way_out=way_out
        )
    return name


def _set_refusal(problem: str, path: Path) -> InvalidInput:
    way_out = "name a task folder (instruction.md, task.toml, tests/test.sh) or a folder of those"
    return InvalidInput(problem, field="task_set", value=path, way_out=way_out)


def _refusal(problem: str, path: str, way_out: str) -> InvalidInput:
    return InvalidInput(problem, field="task", value=path, way_out=way_out)
