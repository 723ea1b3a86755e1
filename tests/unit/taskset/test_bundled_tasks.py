"""The tasks that ship are whole; whether their verdicts are right is for `muster tasks check`."""

from __future__ import annotations

import re
from pathlib import Path

from muster.taskset import read_task_set, unpack

TASKS = Path(__file__).parents[3] / "tasks"


def test_eight_one_command_tasks_and_four_of_several_turns():
    turns = [task.max_turns for task in read_task_set(TASKS)]
    assert (turns.count(1), sum(1 for n in turns if n in (3, 4))) == (8, 4)


def test_each_has_a_right_and_a_wrong_solution_that_stay_at_home():
    for task in read_task_set(TASKS):
        solution = TASKS / task.name.removeprefix("muster/") / "solution"
        assert {path.name for path in solution.iterdir()} == {"solve.sh", "wrong.sh"}
        assert not any("solution" in path for path in unpack(task.archive))


def test_verifiers_take_their_tools_from_the_read_only_base():
    tools = re.compile(r"(?<![/\w-])(cat|head|tr|cmp|date|grep|wc|ls|stat|python3) ")
    for task in read_task_set(TASKS):
        script = unpack(task.archive)["tests/test.sh"].data.decode()
        code = [line for line in script.splitlines() if not line.startswith("#")]
        assert not [line for line in code if tools.search(line)], task.name
        assert code[-1].endswith("> /logs/verifier/reward.txt"), task.name
