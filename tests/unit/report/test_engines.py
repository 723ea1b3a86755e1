"""GPU seconds waiting on environments, by hand and against a sampled oracle."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.engines import Engine, Stretch, engines, peak
from muster.report import report
from muster.run_index import RunIndex

Story = Any


def test_an_engine_that_always_decodes_waits_for_nothing() -> None:
    busy = Engine("e", 50.0, (Stretch(0, 10, 50.0, 4, 2),))
    assert busy.waiting_s(0, 10) == 0


def test_an_idle_engine_waits_by_the_share_of_its_episodes_in_boxes() -> None:
    idle = Engine("e", 50.0, (Stretch(0, 10, 0.0, 4, 1),))
    assert idle.waiting_s(0, 10) == 2.5
    assert idle.waiting_s(8, 99) == 0.5


def test_a_half_busy_engine_waits_half() -> None:
    half = Engine("e", 50.0, (Stretch(0, 10, 25.0, 2, 2),))
    assert half.waiting_s(0, 10) == 5


def test_a_hold_is_not_the_environments_time() -> None:
    held = Engine("e", 50.0, (Stretch(0, 10, 0.0, 2, 0),))
    assert held.waiting_s(0, 10) == 0


def test_one_episode_waits_for_its_own_steps(story: Story) -> None:
    """5 tokens in a second of decoding, a second of the tool, a second of verification."""
    story.job(groups=1)
    story.opened("job-00000", size=1)
    story.episode("job-00000", 0, turns=1, at=10)
    [engine] = engines(RunIndex(story.record()))
    assert (engine.replica, engine.peak_tokens_per_s) == ("e0", 5.0)
    assert engine.waiting_s(0, 100) == 2.0
    assert engine.waiting_s(0, 12) == 1.0


def test_an_engine_with_other_work_waits_less(story: Story) -> None:
    """While one is in its box, the other decodes at the best rate that was seen."""
    story.job(groups=1)
    story.opened("job-00000", size=2)
    story.episode("job-00000", 0, turns=1, at=10)
    story.episode("job-00000", 1, turns=1, at=11)
    [engine] = engines(RunIndex(story.record()))
    assert engine.peak_tokens_per_s == 5.0
    assert engine.waiting_s(0, 100) == 2.0  # 12–13 both in boxes, 13–14 the second one


def test_batches_are_charged_for_their_own_time(good: Story) -> None:
    first, second = report(good.record()).batches
    assert first.gpu_seconds_waiting_on_environments == 3.0
    assert second.gpu_seconds_waiting_on_environments == 3.0


def test_the_peak_is_kept_over_a_whole_second() -> None:
    burst = [Stretch(0, 0.1, 100.0, 1, 0), Stretch(0.1, 2, 0.0, 1, 0)]
    assert peak(burst) == pytest.approx(10.0)
    assert peak([]) == 0.0


PIECES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=6
)


@given(PIECES)
def test_the_peak_equals_a_window_tried_at_every_tick(pieces: list[tuple[int, int, int]]) -> None:
    """In ticks of a quarter second, so a window has four of them."""
    ticks: list[float] = []
    stretches = []
    for gap, length, rate in pieces:
        ticks += [0.0] * gap
        start = len(ticks) / 4
        ticks += [rate / 4] * length
        stretches.append(Stretch(start, len(ticks) / 4, float(rate), 1, 0))
    padded = [0.0] * 4 + ticks + [0.0] * 4
    best = max(sum(padded[n : n + 4]) for n in range(len(padded) - 3))
    assert peak(stretches) == pytest.approx(best)
