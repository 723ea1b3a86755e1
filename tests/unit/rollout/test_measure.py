"""What the recorder says of small runs that were worked out by hand."""

from __future__ import annotations

import random

import pytest

from sim.rollout.doing import Doing, Timeline, split
from sim.rollout.figures import (
    Fleet,
    cohort_distances,
    figures,
    ks_distance,
    lag_slope,
    steady,
    whole_cohorts,
)
from sim.rollout.measure import Recorder, Sample


def line(*changes: tuple[float, Doing], done_at: float | None) -> Timeline:
    made = Timeline()
    made.changes += changes
    made.done_at = done_at
    return made


def seconds(found: dict[Doing, float]) -> dict[str, float]:
    return {str(doing): round(value, 9) for doing, value in found.items() if value}


def test_an_instant_is_shared_equally_among_those_that_still_block() -> None:
    # 0-4 both block: a decodes (2 s of share), b starts its box until 2 (1 s), then decodes (1 s).
    # 4-10 only b blocks: decodes until 6, then acts for 4.
    a = line((0.0, Doing.DECODE), done_at=4.0)
    b = line((0.0, Doing.BOX_START), (2.0, Doing.DECODE), (6.0, Doing.TOOL), done_at=10.0)
    assert seconds(split([a, b], 0.0, 10.0)) == {"decode": 5.0, "box_start": 1.0, "tool": 4.0}


def test_only_the_asked_interval_counts_and_who_was_done_before_counts_for_nothing() -> None:
    early = line((0.0, Doing.TOOL), done_at=5.0)
    late = line((1.0, Doing.HOLD), (8.0, Doing.VERIFY), done_at=12.0)
    assert seconds(split([early, late], 6.0, 12.0)) == {"hold": 2.0, "verify": 4.0}


def test_not_launched_is_queueing_and_nothing_left_is_transfer() -> None:
    only = line((3.0, Doing.TOOL), done_at=5.0)
    assert seconds(split([only], 0.0, 9.0)) == {"queue": 3.0, "tool": 2.0, "transfer": 4.0}


def test_the_shares_sum_to_the_whole_whatever_happens() -> None:
    rng = random.Random(4)
    for _ in range(50):
        lines = []
        for _ in range(rng.randint(1, 12)):
            times = sorted(rng.uniform(0, 1000) for _ in range(rng.randint(0, 40)))
            changes = [(at, rng.choice(list(Doing))) for at in times]
            lines.append(line(*changes, done_at=rng.choice([None, rng.uniform(0, 1000)])))
        start, end = sorted((rng.uniform(0, 1000), rng.uniform(0, 1000)))
        assert sum(split(lines, start, end).values()) == pytest.approx(end - start, abs=1e-9)


def recorder(**changes: int) -> Recorder:
    return Recorder(group_size=2, replicas=changes.get("replicas", 1), peak_rate=10.0)


def finish(
    told: Recorder, group: int, sibling: int, start: float, end: float, alone: float
) -> None:
    told.launched(group, sibling, 0, alone, start)
    told.state(group, sibling, Doing.DECODE, start)
    told.finished(group, sibling, end)


def test_a_batch_knows_its_interval_its_tail_and_its_age() -> None:
    told = recorder()
    # Five groups of two, done at 1 … 10: nine tenths are done at 9.
    for n in range(10):
        finish(told, n // 2, n % 2, 0.0, n + 1.0, alone=5.0)
    finish(told, 5, 0, 2.0, 4.0, alone=5.0)  # done before its batch was asked for
    first = told.cut(range(5), 10.0)
    assert (first.interval_s, first.tail_s) == (10.0, 1.0)
    finish(told, 5, 1, 10.0, 12.0, alone=5.0)
    second = told.cut([5], 12.0)
    assert (second.interval_s, second.tail_s, second.split["decode"]) == (2.0, 0.0, 2.0)
    assert [(s.age_s, s.lag) for s in told.samples[-2:]] == [(10.0, 1), (2.0, 0)]


def test_a_group_that_runs_again_whole_blocks_again() -> None:
    told = recorder()
    finish(told, 0, 0, 0.0, 4.0, alone=4.0)
    told.launched(0, 1, 0, 6.0, 0.0)
    told.state(0, 1, Doing.TOOL, 0.0)
    told.failed(0, 1, 6.0)
    for sibling in (0, 1):
        told.launched(0, sibling, 1, 8.0, 6.0)
        told.state(0, sibling, Doing.DECODE, 6.0)
        told.finished(0, sibling, 14.0)
    batch = told.cut([0], 14.0)
    # 0-4 decode and tool; 4-6 the finished one waits for its group (hold), the other acts;
    # 6-14 both decode again.
    assert batch.split["hold"] == pytest.approx(1.0)
    assert batch.split["tool"] == pytest.approx(3.0)
    assert batch.split["decode"] == pytest.approx(2.0 + 8.0)
    assert [sample.attempt for sample in told.samples] == [1, 1]
    assert (told.attempts, told.lost) == (4, 1)


def test_an_answered_turn_is_told_afterwards() -> None:
    told = recorder()
    told.launched(0, 0, 0, 1.0, 0.0)
    told.launched(0, 1, 0, 1.0, 0.0)
    told.gave_up(0, 1, 0.0)
    told.generated(0, 0, 0.0, queue_s=1.0, prefill_s=2.0)
    told.state(0, 0, Doing.TOOL, 7.0)
    told.finished(0, 0, 9.0)
    batch = told.cut([0], 9.0)
    assert {name: s for name, s in batch.split.items() if s} == pytest.approx(
        {"queue": 1.0, "prefill": 2.0, "decode": 4.0, "tool": 2.0}
    )
    assert [sample.sibling for sample in told.samples] == [0]


def test_an_engine_waits_on_environments_by_the_share_of_its_episodes_that_are_in_boxes() -> None:
    told = recorder(replicas=2)
    told.launched(0, 0, 0, 1.0, 0.0)
    told.launched(0, 1, 0, 1.0, 0.0)  # on the other replica until it is seated
    told.state(0, 1, Doing.BOX_START, 0.0)
    told.seated(0, 1, 0, 5.0)
    told.state(0, 0, Doing.TOOL, 10.0)
    told.state(0, 1, Doing.DECODE, 15.0)
    told.sampled(0, 50.0, 20.0)
    told.sampled(1, 0.0, 20.0)
    # Replica 0: shares 0 (0-5), 1/2 (5-10), 1 (10-15), 1/2 (15-20) = 10 s, at 2.5 of 10 tokens a
    # second: 7.5 s. Replica 1: 1 (0-5), then nobody: 5 s at rate 0.
    assert told.gpu_seconds_waiting_on_environments == pytest.approx(7.5 + 5.0)
    told.state(0, 0, Doing.HOLD, 20.0)  # held by the router: no environment's time
    told.sampled(0, 50.0, 30.0)
    assert told.gpu_seconds_waiting_on_environments == pytest.approx(12.5)


def test_bias_is_told_by_launch_cohort_with_every_group_followed_to_its_end() -> None:
    told = recorder()
    for group in range(4):
        for sibling in (0, 1):
            finish(told, group, sibling, group, group + 1.0, alone=10.0)
        told.cut([group], group + 1.0)
    # Launched after four cuts: durations 1, 2 | 3, 4. Group 4 loses its long one, which runs again
    # shorter; group 5 completes after the last batch; group 6 is filtered.
    for group, alone in ((4, 1.0), (5, 3.0), (6, 5.0)):
        finish(told, group, 0, 5.0, 6.0, alone=alone)
        told.launched(group, 1, 0, alone + 1.0, 5.0)
    told.failed(4, 1, 6.0)
    told.launched(4, 1, 1, 0.5, 6.0)
    for group in (4, 5, 6):
        told.finished(group, 1, 7.0)
    told.cut([4], 7.0)
    assert told.open_groups == 2
    told.completed_after(5, 8.0)
    told.dropped(6)
    # Dispatched 1 2 3 4 5 6, trained 0.5 1 3 4: furthest apart at 4 (4/6 against 4/4).
    assert cohort_distances(told) == [(2, 0.0), (6, pytest.approx(1 / 3))]
    assert told.fates == dict.fromkeys(range(5), "trained") | {5: "completed", 6: "filtered"}


def test_distances_and_slopes() -> None:
    assert ks_distance([1, 2, 3, 4], [1, 2, 3, 4]) == 0.0
    assert ks_distance([1, 2], [3, 4]) == 1.0 == ks_distance([1], [])
    samples = [Sample(0, 0, 0, 1000.0 * n, 0.0, 2 * n + 1) for n in range(5)]
    assert lag_slope(samples) == pytest.approx(2.0)
    assert lag_slope(samples[:1]) == 0.0


def test_slopes_leave_out_cohorts_that_were_not_trained_whole() -> None:
    """What of them is in a batch already is quick: it would hide how long the slow ones wait."""
    told = recorder()
    for group in (0, 1):
        for sibling in (0, 1):
            finish(told, group, sibling, 0.0, 1.0, alone=1.0)
    told.cut([0], 1.0)
    told.launched(2, 0, 0, 50.0, 1.0)  # of the second cohort, still at work at the end
    finish(told, 3, 0, 1.0, 2.0, alone=1.0)
    finish(told, 3, 1, 1.0, 2.0, alone=1.0)
    told.cut([1], 2.0)
    told.cut([3], 3.0)
    assert {sample.group for sample in whole_cohorts(told)} == {0, 1}
    assert {sample.group for sample in told.samples} == {0, 1, 3}


def test_no_cohort_that_is_large_enough_is_the_worst_distance() -> None:
    told = recorder()
    finish(told, 0, 0, 0.0, 1.0, alone=1.0)
    finish(told, 0, 1, 0.0, 1.0, alone=1.0)
    told.cut([0], 1.0)
    assert figures(told, [Fleet(1.0, (1.0,), 0, 0)], arm="x", regime="y", seed=1).ks_worst == 1.0


def test_steady_are_the_batches_after_those_that_settle() -> None:
    told = recorder()
    for group in range(12):
        finish(told, group, 0, 10.0 * group, 10.0 * group + 5.0, alone=5.0)
        finish(told, group, 1, 10.0 * group, 10.0 * group + 5.0, alone=5.0)
        told.cut([group], 10.0 * (group + 1))
    assert [batch.groups[0] for batch in steady(told.batches)] == [6, 7, 8, 9, 10, 11]
    assert len(steady(told.batches[:11])) == 5
    assert len(steady(told.batches[:10])) == 9  # too few would be left: all but the cold first
    assert len(steady(told.batches[:1])) == 1


def test_figures_leave_the_first_batch_out_of_what_is_steady() -> None:
    told = recorder(replicas=2)
    for group, (start, end) in enumerate(((0.0, 50.0), (50.0, 60.0), (60.0, 80.0))):
        for sibling in (0, 1):
            finish(told, group, sibling, start, end, alone=5.0)
        told.engines(1000 * (group + 1) ** 2, 100 * (group + 1) ** 2)
        told.cut([group], end)
    told.engines(10**6, 10**6)  # after the last batch: in no figure
    fleets = [
        Fleet(at, (busy, 2 * busy), 0, 0) for at, busy in ((50.0, 5.0), (60.0, 8.0), (80.0, 11.0))
    ]
    found = figures(told, fleets, arm="x", regime="y", seed=1)
    assert (found.first_batch_s, found.interval_s, found.intervals_s) == (50.0, 15.0, (10.0, 20.0))
    assert sum(found.split_s.values()) == pytest.approx(found.interval_mean_s)
    assert found.busy == pytest.approx(9.0 / 30.0)  # (6 + 12) / 2 of the 30 s after the first cut
    assert found.busy_worst == pytest.approx(12.0 / 9.0)
    # From the first cut to the third, over two batches.
    assert (found.prefilled_tokens, found.recomputed_tokens) == (4000.0, 400.0)
    assert (found.fates, found.lag_max, found.age_p50_s) == (1.0, 0, 20.0)
