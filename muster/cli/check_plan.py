"""What `muster tasks check` will try, and what reading the tasks already tells.

Owns: the tries of a task, refusals and remarks. Promise: every task of the set is planned or
refused with all its reasons; nothing is started. Does not cover: the boxes (check.py), what is
shown (check_told.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from muster.errors import InvalidInput, MusterError
from muster.task_yaml import solution_script
from muster.taskset import Task, examine, fill, read_task, solution_env, task_folders
from muster.types import Value

WAYS = ("nothing", "wrong", "solve")
SCRIPT_BYTES_MAX = 32 << 10
# Where each format keeps its solutions; the first that is there counts.
_SOLVE = ("solution/solve.sh", "solution.sh", "solution.yaml")
_WRONG = ("solution/wrong.sh", "wrong.sh")


class Try(Value, frozen=True):
    """One way to attempt a task and the reward it must get."""

    way: str  # one of WAYS
    script: str
    wanted: float
    env: tuple[tuple[str, str], ...] = ()


class Note(Value, frozen=True):
    """Something to say of a task: a refusal, with its way out, or a remark."""

    task: str
    field: str
    text: str
    way_out: str = ""


class Plan(Value, frozen=True):
    """What there is to try, and what the reading found."""

    work: tuple[tuple[Task, Try], ...]
    refused: tuple[Note, ...]
    remarks: tuple[Note, ...]


def plan(path: Path, seeds: int) -> Plan:
    """Every task at `path`; one with parameters under so many seeds, from its split's first.

    Raises InvalidInput when there is no task at all.
    """
    work: list[tuple[Task, Try]] = []
    refused: list[Note] = []
    remarks: list[Note] = []
    folders: dict[str, str] = {}  # name of a task → its folder
    for folder in task_folders(path):
        name = folder.resolve().name
        try:
            read = examine(folder)
            own = read.task.name.partition("@")[0] if read.task is not None else name
            remarks += [Note(own, said.field, said.text) for said in read.remarks]
            refused += [refusal(own, error) for error in read.refusals]
            if read.task is None:
                continue
            if own in folders:
                refused.append(_doubled(own, folders[own], name))
                continue
            folders[own] = name
            work += _work(folder, read.task, seeds)
            if _first(folder, _WRONG) is None:
                missing = "there is none: what only looks right is not tried"
                remarks.append(Note(own, "wrong.sh", missing))
        except InvalidInput as error:
            refused.append(refusal(name, error))
    return Plan(tuple(work), tuple(refused), tuple(remarks))


def refusal(task: str, error: MusterError) -> Note:
    """What an error says of a task; on one line."""
    return Note(task, error.field, " ".join(error.problem.split()), error.way_out)


def _doubled(task: str, first: str, second: str) -> Note:
    problem = f"two folders have this name, {first} and {second}: the set cannot be submitted"
    return Note(f"{task} ({second})", "task.name", problem, "give one of them another name")


def tries(folder: Path, seed: int | None = None) -> tuple[Try, ...]:
    """The tries of the task in `folder`; InvalidInput when there is no solution."""
    solve, wrong = _first(folder, _SOLVE), _first(folder, _WRONG)
    if solve is None:
        raise InvalidInput(
            "the check needs a solution",
            field="task",
            value=folder.name,
            way_out=f"add one of {', '.join(_SOLVE)}, which solves the task, and one of "
            f"{', '.join(_WRONG)}, which looks right and is not",
        )
    env = tuple(sorted(solution_env(folder).items()))
    found = [Try("nothing", "", 0.0)]
    if wrong is not None:
        found.append(Try("wrong", _script(folder, wrong, seed), 0.0, env))
    return (*found, Try("solve", _script(folder, solve, seed), 1.0, env))


def _work(folder: Path, task: Task, seeds: int) -> list[tuple[Task, Try]]:
    first = task.name.partition("@")[2]
    if not first:
        return [(task, attempt) for attempt in tries(folder)]
    return [
        (read_task(folder, seed=seed), attempt)
        for seed in range(int(first), int(first) + seeds)
        for attempt in tries(folder, seed)
    ]


def _first(folder: Path, names: Sequence[str]) -> str | None:
    return next((name for name in names if (folder / name).is_file()), None)


def _script(folder: Path, name: str, seed: int | None) -> str:
    text = fill(folder, name, seed)
    if name.endswith(".yaml"):
        text = solution_script(text)
    if len(text.encode()) > SCRIPT_BYTES_MAX:
        problem, way_out = f"over {SCRIPT_BYTES_MAX} bytes", "make it shorter"
        raise InvalidInput(problem, field="task", value=folder / name, way_out=way_out)
    return text
