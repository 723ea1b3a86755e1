"""How late the loop was, counted by the timers that it held up."""

from __future__ import annotations

import asyncio
import logging
import math

import pytest

from muster.lag import EDGES_MS, LoopLag, delays_ms, quantile_ms, summary


def test_a_timer_that_came_in_time_is_one_delay() -> None:
    late, due = delays_ms(10.0, 10.002)
    assert late == [pytest.approx(2.0)]
    assert due == pytest.approx(10.01)


def test_a_stall_counts_for_each_timer_that_it_held_up() -> None:
    late, due = delays_ms(10.0, 10.035)
    assert late == pytest.approx([35.0, 25.0, 15.0, 5.0])
    assert due == pytest.approx(10.04)


def test_a_stall_of_hours_is_bounded() -> None:
    late, due = delays_ms(0.0, 7200.0)
    assert len(late) == 6000
    assert due >= 7200.0


def test_a_summary_is_of_all_delays_of_its_window() -> None:
    found = summary([float(n) for n in range(1, 101)])
    assert (found.timers, found.p50_ms, found.p99_ms, found.max_ms) == (100, 50.0, 99.0, 100.0)


def test_counts_of_windows_add_up_to_those_of_their_delays() -> None:
    one, other = [0.5, 12.0, 50.0, 50.5], [2000.0, 12.5]
    added = [a + b for a, b in zip(summary(one).counts, summary(other).counts, strict=True)]
    assert tuple(added) == summary(one + other).counts
    assert sum(added) == 6
    assert added[-1] == 1  # later than the last edge
    assert added[EDGES_MS.index(50)] == 1
    assert added[EDGES_MS.index(60)] == 1


def test_a_quantile_of_counts_is_the_edge_that_the_true_one_does_not_pass() -> None:
    late = [3.0] * 97 + [48.0] * 2 + [900.0]
    counts = summary(late).counts
    assert [quantile_ms(counts, share) for share in (0.5, 0.97, 0.98, 0.99, 1.0)] == [
        5.0, 5.0, 50.0, 50.0, 1000.0,
    ]  # fmt: skip
    assert quantile_ms(summary([5000.0]).counts, 0.99) == math.inf
    with pytest.raises(ValueError, match="no timer"):
        quantile_ms([0] * (len(EDGES_MS) + 1), 0.99)


async def test_the_gauge_is_told_once_a_window(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "muster.lag")
    lag = LoopLag(asyncio.get_running_loop(), tell_s=0.02)
    async with asyncio.timeout(5):
        while not caplog.records:  # noqa: ASYNC110 - a log has nothing to wait on
            await asyncio.sleep(0.005)
    lag.stop()
    told = vars(caplog.records[0])
    assert told["timers"] >= 1
    assert 0.0 <= told["p50_ms"] <= told["p99_ms"] <= told["max_ms"]
