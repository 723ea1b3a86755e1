"""The split of the time to a trainable batch, against a dumb sampled oracle."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.split import PARTS, TRANSFER, Lane, split, straggler_tail
from muster.types import EpisodeState, StateInterval

S = EpisodeState


def lane(done: float, *pieces: tuple[EpisodeState, float, float]) -> Lane:
    return Lane(tuple(StateInterval(state, a, b) for state, a, b in pieces), done)


def nonzero(parts: dict[str, float]) -> dict[str, float]:
    return {part: seconds for part, seconds in parts.items() if seconds}


def test_every_part_is_named_even_when_it_took_no_time() -> None:
    assert tuple(split([], 0, 0)) == PARTS
    assert set(PARTS) == {*EpisodeState, TRANSFER}


def test_one_sibling_is_split_by_its_own_states() -> None:
    one = lane(6, (S.PREFILL, 0, 1), (S.DECODE, 1, 4), (S.TOOL, 4, 6))
    assert nonzero(split([one], 0, 6)) == {"prefill": 1, "decode": 3, "tool": 2}


def test_an_instant_is_shared_equally_among_blocking_siblings() -> None:
    lanes = [lane(4, (S.DECODE, 0, 4)), lane(4, (S.TOOL, 0, 4))]
    assert nonzero(split(lanes, 0, 4)) == {"decode": 2, "tool": 2}


def test_a_finished_sibling_takes_no_share_any_more() -> None:
    lanes = [lane(1, (S.DECODE, 0, 1)), lane(4, (S.TOOL, 0, 4))]
    assert nonzero(split(lanes, 0, 4)) == {"decode": 0.5, "tool": 3.5}


def test_a_sibling_that_is_not_launched_waits_in_the_queue() -> None:
    assert nonzero(split([lane(5, (S.DECODE, 3, 5))], 0, 5)) == {"queue": 3, "decode": 2}


def test_time_after_the_last_sibling_is_transfer() -> None:
    assert nonzero(split([lane(2, (S.VERIFY, 0, 2))], 0, 3)) == {"verify": 2, "transfer": 1}


def test_what_happened_before_the_trainer_asked_does_not_count() -> None:
    one = lane(6, (S.DECODE, 0, 4), (S.TOOL, 4, 6))
    assert nonzero(split([one], 3, 6)) == {"decode": 1, "tool": 2}


def test_a_batch_that_was_ready_when_asked_for_took_no_time() -> None:
    assert nonzero(split([lane(2, (S.DECODE, 0, 2))], 5, 4)) == {}


def test_a_later_attempt_speaks_over_an_abandoned_one() -> None:
    one = lane(4, (S.TOOL, 0, 4), (S.BOX_START, 1, 2), (S.DECODE, 2, 4))
    assert nonzero(split([one], 0, 4)) == {"tool": 1, "box_start": 1, "decode": 2}


def test_a_sibling_that_never_finished_blocks_to_the_end() -> None:
    assert nonzero(split([lane(math.inf, (S.TOOL, 0, 1))], 0, 2)) == {"tool": 1, "queue": 1}


@pytest.mark.parametrize(
    ("done", "tail"),
    [([], 0), ([5], 0), ([1, 9], 0), ([*range(10)], 1), ([0] * 9 + [7], 7), ([0] * 19 + [7], 7)],
)
def test_straggler_tail_runs_from_nine_tenths_done_to_all(done: list[float], tail: float) -> None:
    assert straggler_tail(done) == tail


TICKS = st.integers(0, 12)
INTERVALS = st.builds(
    lambda state, a, b: StateInterval(state, float(a), float(b)),
    st.sampled_from(EpisodeState),
    TICKS,
    TICKS,
)
LANES = st.builds(
    lambda intervals, done: Lane(tuple(intervals), float(done)),
    st.lists(INTERVALS, max_size=5),
    TICKS,
)


def state_at(one: Lane, t: float) -> str:
    """Dumb: look at all intervals, take the covering one that began last."""
    covering = [
        (i.start_unix_s, n, str(i.state))
        for n, i in enumerate(one.intervals)
        if i.start_unix_s <= t < i.end_unix_s
    ]
    return max(covering)[2] if covering else "queue"


def oracle(lanes: list[Lane], start: int, end: int) -> dict[str, float]:
    """All times are whole seconds, so one sample in each second is exact."""
    parts = dict.fromkeys(PARTS, 0.0)
    for second in range(start, end):
        t = second + 0.5
        states = [state_at(one, t) for one in lanes if t < one.done_unix_s] or [TRANSFER]
        for state in states:
            parts[state] += 1 / len(states)
    return parts


@given(st.lists(LANES, max_size=5), TICKS, TICKS)
def test_split_equals_the_sampled_oracle_and_sums_to_the_window(
    lanes: list[Lane], start: int, end: int
) -> None:
    found = split(lanes, start, end)
    assert found == pytest.approx(oracle(lanes, start, end))
    assert math.fsum(found.values()) == pytest.approx(max(0, end - start))
