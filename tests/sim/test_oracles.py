"""What the search once took for wrong, and was a mistake of the checks or of the world."""

from __future__ import annotations

import pytest
from msgspec import structs

from muster.types import EpisodeKey, SamplingParams
from services.router import events as e
from services.router.rules import RouterRules
from sim.engine import Engines
from sim.experiment import Bench, simulate
from sim.faults import Fault, Kind
from sim.models import CALM, ROUGH, TIGHT, Model
from sim.watch import Watch

SMALL, LARGE = EpisodeKey("sim", "j-00000", 0, 1, 9), EpisodeKey("sim", "j-00001", 0, 0, 9)
WAITS_S = 10.0  # before held ones go first


def test_a_write_of_a_process_that_ended_never_reaches_the_restarted_store() -> None:
    bench = Bench(3, structs.replace(CALM, power_cuts=True))
    router, came = bench.routers[0], list[str]()
    assert bench.world.run(lambda: router.machine is not None, lambda: None, until_s=20.0)
    bench.net.open_window(Fault(Kind.DELAY, 0.0, "router", "store", span_s=0.1, amount=5.0))
    router.at_store("late", lambda: came.append("late"), lambda _: None)
    bench.server.kill(0.2)
    router.kill(0.2)
    late = bench.world.now + 10.0
    bench.world.run(lambda: bench.world.now > late, lambda: None, until_s=60.0)
    assert came == []


@pytest.mark.parametrize(("seed", "model", "at_s"), [(3, TIGHT, 29.5), (5, ROUGH, 36.5)])
def test_a_trim_just_before_a_power_cut_does_not_keep_entries_whose_tokens_are_lost(
    seed: int, model: Model, at_s: float
) -> None:
    """Seed 59: the bank froze a group that no server would still have, and sent it for ever."""
    cut = Fault(Kind.STORE_POWER_CUT, at_s, span_s=1.0, amount=0.95)
    assert simulate(seed, structs.replace(model, power_cuts=True), (cut,)).problem == ""


def test_a_command_that_met_no_box_before_its_host_died_may_be_blamed_for_that() -> None:
    """Nobody can tell by then that the box was gone before it."""
    bench = Bench(3, CALM)
    host = bench.hosts[0]
    host.begin()
    host.wanted["a box of its former life"] = (SMALL.id, 2, lambda: True)
    host.kill(1.0)
    assert bench.shared.truth.killed(SMALL.id) == 1


def test_one_taken_over_and_held_ever_since_goes_first_after_a_while() -> None:
    problems = _asked(WAITS_S)
    assert problems == []


def test_one_taken_over_just_now_waits_for_the_larger_ones() -> None:
    problems = _asked(0.0)
    assert [problem.partition(":")[0] for problem in problems] == ["18"]


def _asked(held_s: float) -> list[str]:
    """A small conversation is taken over, held, and asked for beside a large one that fills all."""
    problems: list[str] = []
    rules = RouterRules("sim", 9, admission="kv_fit", probes=False, fair_hold_s=WAITS_S)
    watch = Watch(rules, Engines(), problems.append)
    told = e.SiblingRestored(SMALL.attempt, resume=e.Resume((), host="h", box="b"))
    watch.heard(e.GroupRestored(SMALL.group, "j", 0, (told,)), (), 1.0)
    watch.heard(e.ReplicaTold("r", "r.1", 0, True, 320, 60.0, 16), (), 1.0)
    watch.sent(_generate(LARGE), tuple(range(300)), 1.0)
    watch.sent(_generate(SMALL), tuple(range(200)), 1.0 + held_s)
    return problems


def _generate(episode: EpisodeKey) -> e.Generate:
    return e.Generate(episode, "r", 0, 0, (), 64, 4096, SamplingParams(), 20.0)
