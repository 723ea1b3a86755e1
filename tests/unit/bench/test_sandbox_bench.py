"""What bench.sandbox makes of its times: every target has its figure, every figure its place."""

from __future__ import annotations

import math
import tomllib
from typing import Any

import pytest

from bench import check, sandbox, sandbox_table

SETTINGS = {"rounds": 1, "boxes_alone_per_round": 1, "boxes_at_once": 64, "seconds": 1}
MACHINE = {"cpu": "x", "cores": 2, "kernel": "6", "python": "3", "load_1m_before": 0.5}
TARGETS = tomllib.loads(check.TARGETS.read_text("utf-8"))["sandbox"]


def found(ours: float = 2.0) -> sandbox.Found:
    """As if each took so long (ms), and the bare ones 1 ms."""
    made = sandbox.Found()
    for load in (1, 64):
        for operation in sandbox.OPERATIONS:
            made.times["boxes", load][operation] = [ours] * 5
        made.times["boxes", load]["warm_share"] = [1.0, 0.5]
        for name in (*sandbox.CONTROLS, *(f"exec_{step}" for step in sandbox.STEPS)):
            made.times["bare", load][name] = [1.0] * 5
    for arm, took in (("docker", 20.0), ("boxes_of_rootfs", ours)):
        for name in ("start", "step_bash", "end"):
            made.beside.setdefault(arm, sandbox.Times(list))[name] = [took]
    made.not_beside["swe_rex"] = "not asked for"
    return made


def result(ours: float = 2.0) -> dict[str, Any]:
    return sandbox.result_of(found(ours), 64, MACHINE, SETTINGS)


def test_a_figure_that_is_no_number_is_a_miss() -> None:
    told = check.judged({"figures": {"share": math.nan}}, {"share": {"max": 1.0}})
    assert [*told] == ["share is no number"]


def test_targets_are_judged_by_figures_that_there_are() -> None:
    assert [*check.judged(result(), TARGETS)] == []


def test_boxes_that_are_slow_miss_every_ratio() -> None:
    missed = [*check.judged(result(9.0), TARGETS)]
    assert len(missed) == len(TARGETS) - 1  # but the failed starts


def test_a_start_that_failed_is_a_miss() -> None:
    failed = found()
    failed.failed = 1
    told = check.judged(sandbox.result_of(failed, 64, MACHINE, SETTINGS), TARGETS)
    assert [line.split()[0] for line in told] == ["failed_starts"]


def test_the_least_share_of_warm_boxes_is_told() -> None:
    assert result()["figures"]["warm_share_at_once"] == 0.5


@pytest.mark.parametrize("load", ["One at a time", "64 at once"])
def test_the_page_has_a_row_for_each_operation(load: str) -> None:
    page = "\n".join(sandbox_table.rendered(result()))
    rows = page.partition(f"## {load}")[2].partition("\n## ")[0].count("\n| ")
    assert rows == len(sandbox.OPERATIONS) + 1


def test_what_was_not_measured_says_why() -> None:
    page = "\n".join(sandbox_table.rendered(result()))
    assert "not measured: not asked for" in page
    assert "20.0" in page  # the Docker API
