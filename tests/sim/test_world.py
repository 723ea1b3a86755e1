"""The simulated world: repeatable, and no invariant falls under failures and kills."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from services.readybank import events
from services.readybank.machine import BankMachine
from services.router.machine import RouterMachine
from sim import bank, router
from sim.checks import Violation
from sim.experiment import simulate
from sim.models import CALM, ROUGH, Model

# Many boxes die, so that siblings use up their repairs and groups are filtered.
LOSSY = structs.replace(CALM, box_lost=0.6, group_size=2)


def test_the_same_seed_gives_the_same_trace_and_another_seed_another() -> None:
    traces = [simulate(seed, ROUGH).trace for seed in (1, 1, 2)]
    assert traces[0] == traces[1] != traces[2]


def test_without_faults_every_group_is_trained() -> None:
    result = simulate(7, CALM)
    assert (result.steps, result.groups_trained, result.groups_filtered) == (4, 16, 0)


def test_at_lag_zero_a_filtered_group_frees_its_slot() -> None:
    """Both machines together: what the bank drops, the router replaces, and the job goes on."""
    results = [simulate(seed, LOSSY) for seed in range(5)]
    assert sum(result.groups_filtered for result in results) > 5
    assert all(result.steps >= 1 for result in results)


def test_fifty_worlds_with_failures_and_kills_hold_every_invariant() -> None:
    kills: dict[str, int] = {}
    for seed in range(50):
        for name, count in simulate(seed, ROUGH).kills.items():
            kills[name] = kills.get(name, 0) + count
    assert min(kills[name] for name in ("router", "bank", "trainer")) > 50  # it was rough


class _ForgetsBatches(BankMachine):
    """Does not look at the batches that were frozen before it started."""

    def handle(self, event: events.BankEvent, now: float) -> list[events.BankCommand]:
        kept = not isinstance(event, events.BatchRestored)
        return super().handle(event, now) if kept else []


class _SendsBeforeWriting(BankMachine):
    """Takes a composition for durable as soon as it is decided."""

    def handle(self, event: events.BankEvent, now: float) -> list[events.BankCommand]:
        commands = super().handle(event, now)
        frozen = [c for c in commands if isinstance(c, events.WriteFrozen)]
        early = [x for c in frozen for x in self.handle(events.BatchFrozen(c.batch.step), now)]
        return [*early, *commands]


class _NeverFrees(RouterMachine):
    """Does not hear of groups that were filtered, so their slots stay taken."""

    def handle(self, event: Any, now: float) -> list[Any]:
        told = getattr(event, "fate", None)
        return [] if told == "filtered" else super().handle(event, now)


@pytest.mark.parametrize(
    ("module", "name", "broken", "model", "expected"),
    [
        (bank, "BankMachine", _ForgetsBatches, ROUGH, "twice|two fates|in steps|had its fate"),
        (bank, "BankMachine", _SendsBeforeWriting, ROUGH, "before it was durable"),
        (router, "RouterMachine", _NeverFrees, LOSSY, "stalled"),
    ],
)
def test_a_broken_machine_is_caught(
    module: Any,
    name: str,
    broken: Callable[..., Any],
    model: Model,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The checks can fail: each planted defect is found within a few seeds."""
    monkeypatch.setattr(module, name, broken)
    with pytest.raises(Violation, match=expected):
        _search(model)


def _search(model: Model) -> None:
    for seed in range(60):
        simulate(seed, model)
