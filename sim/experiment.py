"""One run of the world: a job of so many groups, until nothing more can be trained.

Owns: wiring, the kills, the end. Promise: the result says what happened in figures; a violated
invariant or a stall raises, naming seed and time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from muster.types import Fate, Value
from services.readybank.events import BankRules, LabelRecorded
from sim.bank import Bank
from sim.checks import Checks, Violation
from sim.models import Model, spread
from sim.router import Router
from sim.store import RunStore
from sim.trainer import Trainer
from sim.world import World

LONGEST_S = 5_000.0


class Result(Value, frozen=True):
    """Figures of one run; seconds are simulated."""

    seed: int
    trace: str
    events: int
    end_s: float
    steps: int
    groups_trained: int
    groups_filtered: int
    attempts: int
    labels: dict[str, int]
    kills: dict[str, int]
    wait_mean_s: float  # from a trainer's asking to its batch


def simulate(seed: int, model: Model) -> Result:
    """Raises Violation."""
    world, store = World(seed), RunStore()
    bank = Bank(world, store, model, BankRules())
    router = Router(world, store, bank, model)
    trainer = Trainer(world, store, bank, model)
    checks = Checks(store, trainer, model)
    kills: Counter[str] = Counter()
    for name, every_s, start in (
        ("router", model.router_every_s, router.start),
        ("bank", model.bank_every_s, bank.start),
        ("trainer", model.trainer_every_s, trainer.start),
    ):
        if every_s:
            _killed(world, every_s, name, start, kills)

    def done() -> bool:
        """All that may be opened was; those without a fate are whole but cannot fill a batch."""
        filtered = sum(fate.fate is Fate.FILTERED for fate in store.fates.values())
        allowed = model.groups + min(filtered, model.groups)
        left = allowed - len(store.fates)
        return left < model.groups_per_batch and checks.opened() == allowed and router.idle

    try:
        ended = world.run(done, checks, until_s=LONGEST_S)
    except Violation as problem:
        raise Violation(f"seed {seed} at {world.now:.3f} s: {problem}") from problem
    if not ended:
        waits = bank.machine.waits_for()
        raise Violation(f"seed {seed}: stalled, {checks.opened()} opened; {waits}")
    labels = [x.label for x in store.streams["outcomes"] if isinstance(x, LabelRecorded)]
    fates = Counter(fate.fate for fate in store.fates.values())
    return Result(
        seed=seed,
        trace=world.trace,
        events=world.steps,
        end_s=world.now,
        steps=len(store.trained),
        groups_trained=fates[Fate.TRAINED],
        groups_filtered=fates[Fate.FILTERED],
        attempts=router.attempts,
        labels=dict(sorted(Counter(f"{x.outcome}/{x.cause}" for x in labels).items())),
        kills=dict(sorted(kills.items())),
        wait_mean_s=sum(trainer.waits) / max(len(trainer.waits), 1),
    )


def _killed(
    world: World, every_s: float, name: str, start: Callable[[], None], kills: Counter[str]
) -> None:
    """Kill a process again and again; its successor starts at once."""

    def kill() -> None:
        kills[name] += 1
        start()
        world.after(spread(world.rng, every_s), kill)

    world.after(spread(world.rng, every_s), kill)
