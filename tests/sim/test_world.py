"""The simulated world: repeatable, and no invariant falls under seeded faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec import structs

from sim.experiment import Bench, Result, faults_of, simulate
from sim.faults import Fault, Kind
from sim.models import CALM, LOSSY, ROUGH, Model
from sim.search import faultsearch, replay_line, shrink
from sim.states import STATES
from sim.two_speed import measure


def test_the_same_seed_gives_the_same_trace_and_another_seed_another() -> None:
    traces = [simulate(seed, ROUGH).trace for seed in (1, 1, 2)]
    assert traces[0] == traces[1] != traces[2]


def test_without_faults_every_group_is_trained_and_nothing_is_refused() -> None:
    result = simulate(7, CALM)
    assert (result.problem, result.steps, result.groups_trained) == ("", 4, 16)
    assert (result.refused_writes, result.fenced_calls, result.groups_filtered) == (0, 0, 0)


def test_thirty_worlds_with_all_faults_hold_every_invariant() -> None:
    summary = faultsearch(30, ROUGH, first=500)
    assert summary.violations == ()
    assert summary.void == 0
    assert summary.faults > 500  # it was rough
    assert summary.replays > 50
    assert set(summary.fired) == {str(kind) for kind in Kind}
    assert {at.partition(" | ")[2] for at in summary.reach} >= set(STATES)


def test_a_checkpoint_every_third_step_and_no_lag_hold_every_invariant() -> None:
    model = structs.replace(ROUGH, checkpoint_every=3, lag_max=0)
    assert faultsearch(10, model, first=700).violations == ()


def test_at_lag_zero_a_filtered_group_frees_its_slot() -> None:
    """Bank and router together: what the one drops the other replaces, and the job goes on."""
    filtered: Counter[int] = Counter()
    for seed in range(12):
        result = simulate(seed, LOSSY)
        assert result.problem == ""
        filtered[seed] = result.groups_filtered
    assert filtered.total() > 5


def test_groups_that_are_over_leave_the_store() -> None:
    bench = Bench(3, structs.replace(CALM, groups=48))
    written: Counter[str] = Counter()
    bench.store.hears.append(lambda message, entry: written.update([message.stream]))
    bench.run()
    kept = {m.group for step in (10, 11, 12) for m in bench.checks.facts.frozen[step].members}
    left = {scope for scope in bench.store.hashes if scope.startswith("seen:g:")}
    assert left <= {f"seen:g:{group}" for group in kept}
    assert len(bench.store.streams["events"]) < 0.5 * written["events"]
    archived = sum(message.stream == "events" for message in bench.shared.archive)
    assert archived + len(bench.store.streams["events"]) == written["events"]


def test_slow_tasks_are_trained_as_often_as_they_are_dispatched() -> None:
    """Half of the tasks take 1 s, half 30 s; at a lag that lets fast ones overtake."""
    figures = measure(lag_max=4)
    assert figures.off_points <= 5.0
    assert figures.interval_s <= figures.interval_allowed_s


def test_a_failure_shrinks_to_the_faults_it_needs() -> None:
    rough = next(n for n in range(99) if len(faults_of(n, ROUGH)) > 12)
    faults, calm = faults_of(rough, ROUGH), simulate(7, CALM)
    needed = (faults[3], faults[9])

    def run(seed: int, model: Model, chosen: Sequence[Fault] | None) -> Result:
        kept = faults if chosen is None else chosen
        fails = all(fault in kept for fault in needed)
        return structs.replace(calm, seed=seed, problem="at 1.0 s: 2: doubled" if fails else "")

    kept, result = shrink(rough, ROUGH, run=run)
    assert kept == (3, 9)
    assert result.problem
    assert replay_line(rough, kept, "") == f"python -m sim --seed {rough} --faults 3,9"


def test_shrinking_does_not_slip_to_another_failure() -> None:
    calm = simulate(7, CALM)

    def run(seed: int, model: Model, chosen: Sequence[Fault] | None) -> Result:
        return structs.replace(calm, problem="11: ran twice" if chosen is None else "13: no end")

    assert len(shrink(4, ROUGH, run=run)[0]) == len(faults_of(4, ROUGH))


def test_a_world_that_cannot_go_on_says_what_it_waits_for() -> None:
    """No silent stall: the router names the missing host, the bank tells that its trainer waits."""
    bench = Bench(1, structs.replace(CALM, hosts=0))
    assert not bench.world.run(bench.done, bench.checks, until_s=120.0)
    assert "a sandbox host (none is announced)" in bench.waits()
    assert any(bank.stalls for bank in bench.banks)
