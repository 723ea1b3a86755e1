"""What a run tells, however it was made."""

from __future__ import annotations

from typing import Any

import pytest

from sim.rollout.bound import bounds
from sim.rollout.costs import EngineCosts
from sim.rollout.figures import SETTLING, Fleet, figures
from sim.rollout.measure import Recorder
from sim.rollout.run import _result
from sim.rollout.workload import TB_LIKE, Workload


def test_bounds_are_of_exactly_what_the_steady_batches_trained() -> None:
    """The first ones train the short groups: they would lower the bound of what was measured."""
    plans: Any = Workload(TB_LIKE, 7)
    told = Recorder(group_size=1, replicas=1, peak_rate=1.0)
    for group in range(SETTLING + 5):
        told.launched(group, 0, 0, plans.plan(group, 0, 0).alone_s, 10.0 * group)
        told.finished(group, 0, 10.0 * group + 5.0)
        told.cut([group], 10.0 * (group + 1))
    fleets = [Fleet(batch.at, (batch.at,), 0, 0) for batch in told.batches]
    found = _result(figures(told, fleets, arm="x", regime="tb-like", seed=7), told, TB_LIKE, 7)
    costs = EngineCosts()
    late = [sample for sample in told.samples if sample.group >= SETTLING]
    assert found.bounds == bounds(late, plans, costs, 5)
    assert len(found.each) == 5
    assert sum(bound.b_s for bound in found.each) / 5 == pytest.approx(found.bounds.b_s)
    assert found.each[1] == bounds([s for s in late if s.group == SETTLING + 1], plans, costs, 1)
