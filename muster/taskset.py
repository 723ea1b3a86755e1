"""Read task sets: folders in Harbor's format (instruction.md, task.toml, environment/, tests/) or
in Terminal-Bench 1's (task.yaml, Dockerfile, run-tests.sh, tests/).

Owns: which folders are tasks, and their instances. Promise: a folder and its archive read the
same; an instance is a function of (task, seed). Does not cover: what is in a task and why one is
refused (task_read.py), the tar (archive.py), what parameters mean (instances.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from muster import fetching, instances, task_fields
from muster.archive import BENCH, TaskFile, pack, pack_files, unpack
from muster.dockerfile import Recipe, RunCommand
from muster.errors import InvalidInput
from muster.task_fields import Remark, TaskSettings
from muster.task_read import (
    Task,
    checked_name,
    environment_files,
    examine_recipe,
    settings_of,
    task_from_archive,
)
from muster.types import Value

__all__ = [
    "Examined",
    "Task",
    "TaskFile",
    "environment_files",
    "examine",
    "fill",
    "instantiate",
    "pack",
    "read_instances",
    "read_task",
    "read_task_set",
    "solution_env",
    "task_folders",
    "task_from_archive",
    "unpack",
]

TASKS_MAX = 4096
INSTANCES_MAX = 1024  # of one submission; more groups than that take them in turn
SUBMISSION_BYTES_MAX = 48 << 20
_REFUSED_SHOWN = 6  # tasks in one error
_MARKS = ("task.toml", "instruction.md", "tests", BENCH, "run-tests.sh")


class Examined(Value, frozen=True):
    """All there is to say of a task folder. task: None when there is anything to refuse."""

    task: Task | None
    refusals: tuple[InvalidInput, ...] = ()
    remarks: tuple[Remark, ...] = ()


def task_folders(path: Path) -> list[Path]:
    """The task folders at `path`: itself, or those in it, sorted by name.

    Files beside the task folders, and folders whose name starts with `.` or `_`, are not tasks.
    Raises InvalidInput (field `task_set`).
    """
    if not path.is_dir():
        raise _set_refusal("there is no such folder", path)
    if any((path / name).exists() for name in _MARKS):
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
    refused: list[tuple[str, InvalidInput]] = []
    for folder in task_folders(path):
        try:
            task = read_task(folder)
        except InvalidInput as error:
            refused.append((folder.resolve().name, error))
            continue
        if task.name in tasks:
            raise _set_refusal(f"two tasks are named {task.name!r}", folder)
        tasks[task.name] = task
    if refused:
        raise refused_of(refused, path)
    return _of_split(list(tasks.values()), split)


def refused_of(refused: Sequence[tuple[str, InvalidInput]], path: object) -> InvalidInput:
    """One error for the tasks of a set that cannot be run: name → why."""
    _, first = refused[0]
    further = "`muster tasks check PATH` tells all that is refused"
    if len(refused) == 1:
        way_out = f"{first.way_out}; {further}" if first.way_out else further
        return type(first)(first.problem, field=first.field, value=first.value, way_out=way_out)
    told = "; ".join(
        f"{name}: {error.field}: {error.problem.removeprefix(f'task {name}: ')}"
        for name, error in refused[:_REFUSED_SHOWN]
    )
    more = len(refused) - _REFUSED_SHOWN
    problem = f"{len(refused)} tasks are refused: {told}" + (f"; and {more} more" * (more > 0))
    return InvalidInput(problem, field="task_set", value=path, way_out=f"mend them; {further}")


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
        problem = f"task {folder.resolve().name}: {error.problem}"
        raise InvalidInput(
            problem, field=error.field, value=error.value, way_out=error.way_out
        ) from error


def count_tasks(paths: Sequence[Path], split: str) -> int:
    """How many tasks of the split there are. Raises InvalidInput as `read_task_set` does."""
    found = [read_task(folder) for path in paths for folder in task_folders(path)]
    return len(_of_split(found, split))


def read_instances(
    paths: Sequence[Path],
    *,
    seed: int,
    groups: int,
    split: str = "train",
    held_out: bool = False,
) -> list[Task]:
    """A task for each of `groups` groups: the tasks in turn, each round with the next seed.

    seed: of the first round; under split `eval`, and where the instances have to be held out, it
    counts from the first held-out one. At most INSTANCES_MAX are made. Raises InvalidInput as
    `read_task_set` does, for a seed that the split does not have (field `seed`), and for more than
    can be sent at once (field `groups`).
    """
    found = [(folder, read_task(folder)) for path in paths for folder in task_folders(path)]
    kept = {id(task) for task in _of_split([task for _, task in found], split)}
    found = [(folder, task) for folder, task in found if id(task) in kept]
    first = _first_seed(seed, split, -(-groups // len(found)), held_out)
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
    settings = _settings(files)
    name = settings.name or name
    if not settings.parameters:
        return task_from_archive(archive, name=name)
    seed = _seed(settings, seed)
    values = instances.draw(name, settings.parameters, seed)
    filled = {path: _filled(path, file, values) for path, file in files.items()}
    return task_from_archive(pack_files(filled), name=f"{checked_name(name)}@{seed}")


def fill(folder: Path, path: str, seed: int | None = None) -> str:
    """The text of a file of a task folder as the instance of `seed` has it (UTF-8)."""
    text = (folder / path).read_text("utf-8")
    settings = _settings(unpack(pack(folder)))
    if not settings.parameters:
        return text
    name = settings.name or folder.resolve().name
    values = instances.draw(name, settings.parameters, _seed(settings, seed))
    return instances.render(text, values, path)


def examine(folder: Path, *, seed: int | None = None) -> Examined:
    """The task in `folder`, or all that is refused in it; and what is accepted without effect."""
    try:
        files = unpack(pack(folder))
        settings, found = settings_of(files)
        recipe, refusals = examine_recipe(files, settings)
        found.refusals += refusals
        remarks = [*found.remarks, *_of_the_box(files, settings, recipe), *_of_the_script(files)]
        if found.refusals:
            return Examined(None, tuple(found.refusals), tuple(remarks))
        return Examined(read_task(folder, seed=seed), (), tuple(remarks))
    except InvalidInput as error:
        return Examined(None, (error,))


def solution_env(folder: Path) -> dict[str, str]:
    """The variables that the task's own solution runs with."""
    return dict(_settings(unpack(pack(folder))).solution_env)


def _of_the_box(
    files: Mapping[str, TaskFile], settings: TaskSettings, recipe: Recipe
) -> list[Remark]:
    shown = "Dockerfile" if BENCH in files else "environment/Dockerfile"
    nothing = "changes nothing: a box starts nothing of its image"
    remarks = [Remark(f"{shown} {line}", nothing) for line in recipe.inert]
    for step, number in zip(recipe.steps, recipe.lines, strict=True):
        tool = fetching.fetches(step.command) if isinstance(step, RunCommand) else ""
        if tool:
            told = f"{tool} may fetch, and {fetching.NO_NETWORK}: {fetching.COPY_IT}"
            remarks.append(Remark(f"{shown} line {number}: RUN", told))
    if settings.image and recipe.base and recipe.base != settings.image:
        built = "the box is made from environment/Dockerfile, whose prebuilt image this is"
        remarks.append(Remark("environment.docker_image", built))
    return remarks


def _of_the_script(files: Mapping[str, TaskFile]) -> list[Remark]:
    """What the verifier's script cannot do in a box."""
    shown = "run-tests.sh" if BENCH in files else "tests/test.sh"
    file = files.get("tests/run-tests.sh" if BENCH in files else shown)
    if file is None:
        return []
    remarks = []
    if b"\r\n" in file.data:
        told = "its lines end with CR LF, which bash takes for parts of words: save it with LF"
        remarks.append(Remark(shown, told))
    for number, line in enumerate(file.data.decode("utf-8", "replace").split("\n"), start=1):
        tool = "" if line.lstrip().startswith("#") else fetching.fetches(line)
        if tool:
            told = f"{tool} may fetch, and {fetching.NO_NETWORK}: {fetching.INTO_A_BASE}"
            remarks.append(Remark(f"{shown} line {number}", told))
    return remarks


def _settings(files: Mapping[str, TaskFile]) -> TaskSettings:
    settings, found = settings_of(files)
    if found.refusals:
        raise found.refusals[0]
    return settings


def _seed(settings: TaskSettings, seed: int | None) -> int:
    if seed is not None:
        return seed
    return instances.EVAL_SEEDS if settings.split == "eval" else 0


def _filled(path: str, file: TaskFile, values: Mapping[str, instances.Drawn]) -> TaskFile:
    """The file with the values in place of their names; task.toml, and what is no text, as is."""
    if path == "task.toml" or b"{{" not in file.data:
        return file
    try:
        text = file.data.decode("utf-8")
    except UnicodeDecodeError:
        return file
    return msgspec.structs.replace(file, data=instances.render(text, values, path).encode())


def _of_split(tasks: list[Task], split: str) -> list[Task]:
    if split not in (*task_fields.SPLITS, "all"):
        way_out = f"one of {', '.join(task_fields.SPLITS)}, all"
        raise InvalidInput("not a split", field="split", value=split, way_out=way_out)
    found = [task for task in tasks if split in (task.split, "all")]
    if not found:
        others = ", ".join(sorted({task.split for task in tasks}))
        way_out = f"these tasks are of: {others}; choose with --split"
        raise InvalidInput("no task is of that split", field="split", value=split, way_out=way_out)
    return found


def _first_seed(seed: int, split: str, rounds: int, held_out: bool) -> int:
    """Where the rounds begin; evaluation and training never share a seed."""
    first = instances.EVAL_SEEDS
    if seed < 0:
        way_out = "count from 0"
        raise InvalidInput("not a seed", field="instances", value=seed, way_out=way_out)
    if held_out:
        return seed if seed >= first else seed + first
    if split == "eval" and seed < first:
        seed += first
    if split not in ("eval", "all") and seed + rounds > first:
        problem = f"seeds from {first} on are held out for evaluation"
        way_out = f"choose 0 to {first - rounds}, or --split eval"
        raise InvalidInput(problem, field="seed", value=seed, way_out=way_out)
    return seed


def _set_refusal(problem: str, path: Path) -> InvalidInput:
    way_out = "name a task folder (instruction.md, task.toml, tests/test.sh) or a folder of those"
    return InvalidInput(problem, field="task_set", value=path, way_out=way_out)
