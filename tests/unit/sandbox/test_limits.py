"""Whose figure a limit is: the job's, the task's, the usual one; and what is refused."""

from __future__ import annotations

import pytest

from muster.errors import InvalidInput
from muster.types import Limits
from services.sandbox.limits import of_task, resolve

UNSET = Limits(0, 0, 0, 0, 0)
MOST = Limits(1 << 30, 512, 512 << 20, 65536, 65536, 2.0)
TASK = of_task(512 << 20, 128 << 20)


def test_zero_takes_the_task_s_figure_and_then_the_usual_one() -> None:
    usual = Limits(cpus=2.0)  # the host's highest
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
        (Limits(0, 0, 0, 0, 0, 3.0), UNSET, "limits.cpus"),
        (Limits(0, 0, 0, 0, 0, 0.001), UNSET, "limits.cpus"),
        (Limits(0, 0, 0, 0, 0, float("nan")), UNSET, "limits.cpus"),
        (UNSET, of_task(None, None, 2.5), "environment.cpus"),
    ],
)
def test_a_figure_out_of_bounds_is_refused_and_says_whose_it_is(
    asked: Limits, task: Limits, field: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        resolve(asked, task, MOST)
    assert caught.value.field == field
    assert "raise sandbox." in caught.value.way_out


def test_processors_are_those_of_the_job_then_the_task_s_then_the_host_s_highest() -> None:
    task = of_task(None, None, 1.5)
    assert resolve(Limits(cpus=0.5), task, MOST).cpus == 0.5
    assert resolve(UNSET, task, MOST).cpus == 1.5
    assert resolve(UNSET, UNSET, MOST).cpus == 2.0


def test_a_host_that_names_no_highest_number_limits_only_who_asks() -> None:
    open_to_all = Limits(1 << 30, 512, 512 << 20, 65536, 65536, 0.0)
    assert resolve(UNSET, UNSET, open_to_all).cpus == 0.0
    assert resolve(Limits(cpus=64.0), UNSET, open_to_all).cpus == 64.0


@pytest.mark.parametrize(
    ("asked", "task", "field"),
    [
        (Limits(cpus=1.0), UNSET, "limits.cpus"),
        (UNSET, of_task(None, None, 1.0), "environment.cpus"),
        (UNSET, UNSET, "sandbox.cpus_max"),
    ],
)
def test_a_processor_limit_that_the_host_cannot_set_is_refused_and_says_whose_it_is(
    asked: Limits, task: Limits, field: str
) -> None:
    with pytest.raises(InvalidInput, match="cannot limit processors") as caught:
        resolve(asked, task, MOST, limits_cpu=False)
    assert caught.value.field == field
    assert "--check-host" in caught.value.way_out


def test_a_host_that_cannot_limit_processors_serves_who_asks_for_none() -> None:
    open_to_all = Limits(1 << 30, 512, 512 << 20, 65536, 65536, 0.0)
    assert resolve(UNSET, UNSET, open_to_all, limits_cpu=False).cpus == 0.0
