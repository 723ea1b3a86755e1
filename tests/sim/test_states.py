"""Reach: which kind of fault met which state of which machine, and what counts as never."""

from __future__ import annotations

import pytest
from msgspec import structs

from sim.experiment import Bench, faults_of
from sim.faults import _BRINGS, Fault, Kind
from sim.models import CALM, ROUGH, TIGHT
from sim.search import of_seed
from sim.states import IMPOSSIBLE, KV, MET_MIN, STATES, seldom, table


def test_a_fault_waits_for_the_state_that_it_is_aimed_at() -> None:
    bench = Bench(3, structs.replace(TIGHT, faults_until_s=60.0))
    met: list[tuple[str, bool]] = []
    count = bench.world.struck

    def struck(kind: str) -> None:
        met.append((kind, bench.states.has(KV)))
        count(kind)

    bench.world.struck = struck  # type: ignore[method-assign]
    bench.plan([Fault(Kind.DELAY, 1.0, "router", "store", span_s=0.2, at_state=KV)])
    bench.run()
    assert met == [(Kind.DELAY, True)]
    assert bench.world.reach[f"{Kind.DELAY} | {KV}"] == 1


def test_an_armed_fault_strikes_only_while_the_state_lasts() -> None:
    bench = Bench(3, structs.replace(TIGHT, faults_until_s=60.0))
    bench.plan([Fault(Kind.LOST_REPLY, 1.0, at_state=KV)])
    bench.run()
    assert bench.world.reach[f"{Kind.LOST_REPLY} | {KV}"] == bench.world.fired[Kind.LOST_REPLY] == 1


def test_what_waits_for_a_state_that_never_comes_is_dropped_at_the_end_of_faults() -> None:
    bench = Bench(3, structs.replace(CALM, faults_until_s=5.0))
    bench.plan([Fault(Kind.DELAY, 1.0, "router", "store", span_s=0.2, at_state=KV)])
    bench.run()
    assert bench.injector.waiting == []
    assert bench.world.fired == {}


def test_a_few_hundred_seeds_aim_every_kind_at_every_state() -> None:
    aimed = {(f.kind, f.at_state) for seed in range(400) for f in _faults(seed) if f.at_state}
    assert aimed == {(kind, state) for kind in Kind for state in STATES}


@pytest.mark.parametrize("state", _BRINGS)
def test_what_brings_a_state_about_does_so_in_some_calm_world(state: str) -> None:
    """Without any fault but these; each of the ways, in a few worlds."""
    for way in _BRINGS[state]:
        assert any(_comes(seed, state, way) for seed in range(6)), way


def _comes(seed: int, state: str, way: tuple[Fault, ...]) -> bool:
    bench = Bench(seed, of_seed(seed, structs.replace(ROUGH, faults_until_s=90.0)))
    bench.plan([structs.replace(fault, at_s=20.0) for fault in way])
    came = lambda: bool(bench.world.fired) and bench.states.has(state)  # noqa: E731 - one line
    return bench.world.run(came, bench._check, until_s=bench.model.faults_until_s)


def _faults(seed: int) -> tuple[Fault, ...]:
    return faults_of(seed, of_seed(seed, ROUGH))


def test_few_pairs_are_called_impossible_and_each_has_its_reason() -> None:
    pairs = len(Kind) * len(STATES)
    assert len(IMPOSSIBLE) <= 0.05 * pairs
    assert all(reason for reason in IMPOSSIBLE.values())


def test_the_rarest_pair_is_named() -> None:
    reach = {f"{kind} | {state}": 99 for kind in Kind for state in STATES}
    reach[f"{Kind.HANG} | {KV}"] = MET_MIN - 1
    assert seldom(reach)[0] == (MET_MIN - 1, f"{Kind.HANG} | {KV}")
    assert table(reach)[-1].endswith(f"the rarest met {MET_MIN - 1} times; 1 below {MET_MIN}")
