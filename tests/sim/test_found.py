"""What the search has found once: worlds that did not hold, and hold now."""

from __future__ import annotations

import pytest
from msgspec import structs

from sim.experiment import simulate
from sim.faults import Fault, Kind
from sim.models import ROUGH, TIGHT

CUT = Fault(Kind.STORE_POWER_CUT, 1.0, span_s=1.0, amount=0.95)
STOPPED = Fault(Kind.HANG, 9.0, "inference", span_s=60.0, amount=0.1)
TAKEN_OVER = Fault(Kind.KILL, 8.0, "router", span_s=15.0, amount=0.0)


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param((CUT,), id="the record of version 0 goes with the store's last second"),
        pytest.param((TAKEN_OVER,), id="a router takes over openings whose size it does not know"),
        pytest.param((STOPPED, TAKEN_OVER), id="it takes over while a replica does not answer"),
    ],
)
def test_a_world_that_once_did_not_hold(faults: tuple[Fault, ...]) -> None:
    for seed, model in ((3, TIGHT), (5, ROUGH)):
        assert simulate(seed, structs.replace(model, power_cuts=True), faults).problem == ""
