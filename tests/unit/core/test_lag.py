"""How late the loop was, counted by the timers that it held up."""

from __future__ import annotations

import asyncio
import logging

import pytest

from muster.lag import LoopLag, delays_ms, summary


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
