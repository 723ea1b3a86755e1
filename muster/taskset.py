"""Read task sets: Harbor folders (instruction.md, task.toml, environment/, tests/).

Owns: what a task is once read, and every reason to refuse one. Promise: a folder and its archive
read the same; a setting that could change the task's meaning is honoured or refused by name,
never skipped; an instance is a function of (task, seed). Does not cover: building or judging
(the sandbox does), the tar (archive.py), what parameters mean (instances.py).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from muster import instances, task_toml
from muster.archive import TaskFile, pack, pack_files, unpack
from muster.dockerfile import BuildStep, CopyFiles, Recipe, copied, parse
from muster.errors import InvalidInput
from muster.types import Value

__all__ = [
    "Task",
    "TaskFile",
    "fill",
    "instantiate",
    "pack",
    "read_instances",
    "read_task",
    "read_task_set",
    "task_folders",
    "task_from_archive",
    "unpack",
]

INSTRUCTION_BYTES_MAX = 32 << 10
TASKS_MAX = 4096
INSTANCES_MAX = 1024  # of one submission; more groups than that take them in turn
SUBMISSION_BYTES_MAX = 48 << 20
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
    split: str = "train"


def task_folders(path: Path) -> list[Path]:
    """The task folders at `path`: itself, or those in it, sorted by name.

    Files beside the task folders, and folders whose name starts with `.` or `_`, are not tasks.
    Raises InvalidInput (field `task_set`).
    """
    if not path.is_dir():
        raise _set_refusal("there is no such folder", path)
    if any((path / name).exists() for name in ("task.toml", "instruction.md", "tests")):
        return [path]
    folders = sorted(p for p in path.iterdir() if p.is_dir() and p.name[0] not in "._")
    if not folders:
        raise _set_refusal("the folder holds no task", path)
    if len(folders) > TASKS_MAX:
        raise _set_refusal(f"more than {TASKS_MAX} tasks", path)
    return folders


def read_task_set(path: Path, *, split: str = "all") -> list[Task]:
    """The tasks at `path` that belong to `split`, sorted by folder name; see `read_task`.

    Raises InvalidInput (field `task_set`, `split`, or the field of the task that is wrong).
    """
    tasks: dict[str, Task] = {}
    for folder in task_folders(path):
        task = read_task(folder)
        if task.name in tasks:
            raise _set_refusal(f"two tasks are named {task.name!r}", folder)
        tasks[task.name] = task
    return _of_split(list(tasks.values()), split)


def read_task(folder: Path, *, seed: int | None = None) -> Task:
    """The task in `folder`; its name is `task.name` of task.toml, else the folder's own name.

    seed: which instance of a task with parameters; None: the first of its split. Its name then
    ends with `@SEED`. Raises InvalidInput, naming the folder, for what cannot be run here.
    """
    if not folder.is_dir():
        raise _set_refusal("there is no such task folder", folder)
    try:
        return instantiate(pack(folder), name=folder.resolve().name, seed=seed)
    except InvalidInput as error:
        problem = f"task folder {folder}: {error.problem}"
        raise InvalidInput(
            problem, field=error.field, value=error.value, way_out=error.way_out
        ) from error


def read_instances(
    paths: Sequence[Path], *, seed: int, groups: int, split: str = "train"
) -> list[Task]:
    """A task for each of `groups` groups: the tasks in turn, each round with the next seed.

    seed: of the first round; under split `eval` it counts from the first held-out one. At most
    INSTANCES_MAX are made. Raises InvalidInput as `read_task_set` does, for a seed that the split
    does not have (field `seed`), and for more than can be sent at once (field `groups`).
    """
    found = [(folder, read_task(folder)) for path in paths for folder in task_folders(path)]
    kept = {id(task) for task in _of_split([task for _, task in found], split)}
    found = [(folder, task) for folder, task in found if id(task) in kept]
    first = _first_seed(seed, split, -(-groups // len(found)))
    packed = [pack(folder) if "@" in once.name else b"" for folder, once in found]
    tasks: list[Task] = []
    total = 0
    for number in range(min(groups, INSTANCES_MAX)):
        rounds, place = divmod(number, len(found))
        folder, task = found[place]
        if packed[place]:
            name = folder.resolve().name
            task = instantiate(packed[place], name=name, seed=first + rounds)
        tasks.append(task)
        total += len(task.archive)
        if total > SUBMISSION_BYTES_MAX:
            raise InvalidInput(
                f"the instances are over {SUBMISSION_BYTES_MAX >> 20} MiB in all",
                field="groups",
                value=groups,
                way_out=f"submit at most {number} groups at a time",
            )
    return tasks


def instantiate(archive: bytes, *, name: str = "task", seed: int | None = None) -> Task:
    """The instance of a packed task under `seed`; a task without parameters as it is. Pure.

    seed: None takes the first of the task's split.
    """
    files = unpack(archive)
    settings = task_toml.parse(_text(files, "task.toml", INSTRUCTION_BYTES_MAX))
    name = settings.name or name
    if not settings.parameters:
        return task_from_archive(archive, name=name)
    seed = _seed(settings, seed)
    values = instances.draw(name, settings.parameters, seed)
    filled = {path: _filled(path, file, values) for path, file in files.items()}
    return task_from_archive(pack_files(filled), name=f"{_checked_name(name)}@{seed}")


def fill(folder: Path, path: str, seed: int | None = None) -> str:
    """The text of a file of a task folder as the instance of `seed` has it (UTF-8)."""
    text = (folder / path).read_text("utf-8")
    toml = folder / "task.toml"
    settings = task_toml.parse(toml.read_text("utf-8") if toml.is_file() else "")
    if not settings.parameters:
        return text
    name = settings.name or folder.resolve().name
    values = instances.draw(name, settings.parameters, _seed(settings, seed))
    return instances.render(text, values, path)


def task_from_archive(archive: bytes, *, name: str = "task") -> Task:
    """The task packed in `archive`, as it is. Pure.

    name: used when its task.toml gives none, or when it is that name with `@SEED` after it.
    """
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
    _check_filled(files, settings.parameters)
    recipe = _recipe(files)
    return Task(
        name=_resolved_name(settings.name, name),
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
        split=settings.split,
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


def _seed(settings: task_toml.TaskSettings, seed: int | None) -> int:
    if seed is not None:
        return seed
    return instances.EVAL_SEEDS if settings.split == "eval" else 0


def _resolved_name(own: str, given: str) -> str:
    """The task's own name, with the seed that the given one may carry."""
    base, at, seed = given.partition("@")
    if at and (own or base) == base and seed.isdecimal() and len(seed) <= 10:
        return f"{_checked_name(base)}@{seed}"
    return _checked_name(own or given)


def _filled(path: str, file: TaskFile, values: Mapping[str, instances.Drawn]) -> TaskFile:
    """The file with the values in place of their names; task.toml, and what is no text, as is."""
    if path == "task.toml" or b"{{" not in file.data:
        return file
    try:
        text = file.data.decode("utf-8")
    except UnicodeDecodeError:
        return file
    return msgspec.structs.replace(file, data=instances.render(text, values, path).encode())


def _check_filled(files: Mapping[str, TaskFile], parameters: Sequence[instances.Parameter]) -> None:
    """A template must not reach an agent as if it were a task."""
    for path, file in files.items():
        text = file.data.decode("utf-8", "replace")
        if path != "task.toml" and parameters and instances.mentions(text, parameters):
            way_out = "make an instance of it: muster.taskset.instantiate(archive, seed=0)"
            raise _refusal("a parameter of the task has no value yet", path, way_out)


def _of_split(tasks: list[Task], split: str) -> list[Task]:
    if split not in (*task_toml.SPLITS, "all"):
        way_out = f"one of {', '.join(task_toml.SPLITS)}, all"
        raise InvalidInput("not a split", field="split", value=split, way_out=way_out)
    found = [task for task in tasks if split in (task.split, "all")]
    if not found:
        others = ", ".join(sorted({task.split for task in tasks}))
        way_out = f"these tasks are of: {others}; choose with --split"
        raise InvalidInput("no task is of that split", field="split", value=split, way_out=way_out)
    return found


def _first_seed(seed: int, split: str, rounds: int) -> int:
    """Where the rounds begin; evaluation and training never share a seed."""
    held_out = instances.EVAL_SEEDS
    if seed < 0:
        way_out = "count from 0"
        raise InvalidInput("not a seed", field="instances", value=seed, way_out=way_out)
    if split == "eval" and seed < held_out:
        seed += held_out
    if split not in ("eval", "all") and seed + rounds > held_out:
        problem = f"seeds from {held_out} on are held out for evaluation"
        way_out = f"choose 0 to {held_out - rounds}, or --split eval"
        raise InvalidInput(problem, field="seed", value=seed, way_out=way_out)
    return seed


def _set_refusal(problem: str, path: Path) -> InvalidInput:
    way_out = "name a task folder (instruction.md, task.toml, tests/test.sh) or a folder of those"
    return InvalidInput(problem, field="task_set", value=path, way_out=way_out)


def _refusal(problem: str, path: str, way_out: str) -> InvalidInput:
    return InvalidInput(problem, field="task", value=path, way_out=way_out)
