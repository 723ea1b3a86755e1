"""What is checked can be submitted: tasks of every format reach the router."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.client import MusterClient
from muster.taskset import task_from_archive
from tests.unit.client.router_double import RouterDouble

FORMATS = Path(__file__).parents[2] / "tasks_formats"


@pytest.mark.parametrize(
    ("set_", "script", "verdict"),
    [("harbor-all", "tests/test.sh", "files"), ("tb1-all", "tests/run-tests.sh", "pytest")],
)
async def test_a_set_of_each_format_can_be_submitted(set_: str, script: str, verdict: str) -> None:
    router = RouterDouble()
    async with router.serving() as server, MusterClient(server.address) as client:
        await client.submit(FORMATS / set_, groups=2, group_size=2)
    (sent,) = router.submitted
    tasks = [task_from_archive(package.archive, name=package.name) for package in sent.tasks]
    assert tasks
    assert {task.name for task in tasks} == {package.name for package in sent.tasks}
    assert {(task.test_script, task.verdict) for task in tasks} == {(script, verdict)}
