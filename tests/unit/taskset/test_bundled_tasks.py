"""The tasks that ship are whole; whether their verdicts are right is for `muster tasks check`."""

from __future__ import annotations

import re
from collections import Counter
from difflib import SequenceMatcher
from pathlib import Path

import pytest

from muster.cli.demo import DEMO_TASKS
from muster.taskset import Task, read_instances, read_task, read_task_set, unpack

TASKS = Path(__file__).parents[3] / "tasks"
SEEDS = (0, 1, 2, 3, 1_000_000, 1_000_001)


def folder(task: Task) -> Path:
    return TASKS / task.name.removeprefix("muster/").partition("@")[0]


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    return read_task_set(TASKS)


def test_there_are_enough_of_each_kind(tasks: list[Task]):
    splits = Counter(task.split for task in tasks)
    turns = Counter(task.max_turns == 1 for task in tasks if task.split == "train")
    fresh = sum("@" in task.name for task in tasks)
    assert splits == {"train": 23, "eval": 9, "limits": 3}
    assert turns == {True: 14, False: 9}
    assert fresh == 23


def test_the_demo_takes_training_tasks_that_never_change():
    tasks = [read_task(TASKS / name) for name in DEMO_TASKS]
    assert {task.split for task in tasks} == {"train"}
    assert not [task.name for task in tasks if "@" in task.name]


def test_each_has_a_right_and_a_wrong_solution_that_stay_at_home(tasks: list[Task]):
    for task in tasks:
        solution = folder(task) / "solution"
        assert {path.name for path in solution.iterdir()} == {"solve.sh", "wrong.sh"}
        assert not any("solution" in path for path in unpack(task.archive))


def test_verifiers_take_their_tools_from_the_read_only_base(tasks: list[Task]):
    tools = re.compile(r"(?<![/\w-])(cat|head|tr|cmp|date|grep|wc|ls|stat|python3|seq|cut|sort) ")
    for task in tasks:
        script = unpack(task.archive)["tests/test.sh"].data.decode()
        code = [line for line in script.splitlines() if not line.startswith("#")]
        assert not [line for line in code if tools.search(line)], task.name
        assert code[-1].endswith("> /logs/verifier/reward.txt"), task.name


@pytest.mark.parametrize("name", sorted(path.name for path in TASKS.iterdir() if path.is_dir()))
def test_every_seed_fills_everything(name: str):
    for seed in SEEDS:
        task = read_task(TASKS / name, seed=seed)
        texts = [task.instruction, *(str(step) for step in task.build)]
        texts += [f.data.decode() for path, f in unpack(task.archive).items() if "tests/" in path]
        assert not [text for text in texts if "{{" in text]


def test_a_job_of_fresh_instances_meets_hardly_one_twice():
    found = read_instances([TASKS], seed=0, groups=240)
    fresh = [task.digest for task in found if "@" in task.name]
    assert len(set(fresh)) > 0.95 * len(fresh)


def test_evaluation_asks_for_something_else_than_training(tasks: list[Task]):
    def asks(task: Task) -> str:
        return (folder(task) / "instruction.md").read_text()

    trained = [(task.name, asks(task)) for task in tasks if task.split == "train"]
    for task in tasks:
        if task.split == "eval":
            near = {n: SequenceMatcher(None, asks(task), other).ratio() for n, other in trained}
            assert max(near.values()) < 0.75, (task.name, max(near, key=lambda n: near[n]))
