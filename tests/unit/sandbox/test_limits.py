"""Whose figure a limit is: the job's, the task's, the usual one; and what is refused."""

from __future__ import annotations

import pytest

from muster.errors import InvalidInput
from muster.types import Limits
from services.sandbox.limits import of_task, resolve

UNSET = Limits(0, 0, 0, 0, 0)
MOST = Limits(1 << 30, 512, 512 << 20, 65536, 65536)
TASK = of_task(512 << 20, 128 << 20)


def test_zero_takes_the_task_s_figure_and_then_the_usual_one() -> None:
    usual = Limits()
    assert resolve(UNSET, of_task(None, None), MOST) == usual
    granted = resolve(UNSET, TASK, MOST)
    assert (granted.memory_bytes, granted.disk_bytes) == (512 << 20, 128 << 20)
    assert granted.pids == usual.pids


def test_what_the_job_says_goes_before_the_task() -> None:
    granted = resolve(Limits(64 << 20, 7, 0, 0, 0), TASK, MOST)
    assert (granted.memory_bytes, granted.pids, granted.disk_bytes) == (64 << 20, 7, 128 << 20)


def test_the_usual_figures_give_way_to_a_smaller_host() -> None:
    small = Limits(64 << 20, 16, 8 << 20, 512, 1024)
    assert resolve(UNSET, of_task(None, None), small) == small


@pytest.mark.parametrize(
    ("asked", "task", "field"),
    [
        (Limits(2 << 30, 0, 0, 0, 0), UNSET, "limits.memory_bytes"),
        (Limits(1, 0, 0, 0, 0), UNSET, "limits.memory_bytes"),
        (Limits(0, -1, 0, 0, 0), UNSET, "limits.pids"),
        (UNSET, of_task(2 << 30, None), "environment.memory_mb"),
        (UNSET, of_task(None, 1 << 40), "environment.storage_mb"),
    ],
)
def test_a_figure_out_of_bounds_is_refused_and_says_whose_it_is(
    asked: Limits, task: Limits, field: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        resolve(asked, task, MOST)
    assert caught.value.field == field
    assert "raise sandbox." in caught.value.way_out
