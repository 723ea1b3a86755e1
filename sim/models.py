"""How long things take and how often they fail, in the simulation.

Owns: the numbers. Times are exponential around their mean (seconds); probabilities are per call;
`*_every_s` are mean times between kills of a process, 0 for never.
"""

from __future__ import annotations

import random

from muster.types import Value


class Model(Value, frozen=True):
    """One setting of the world."""

    groups: int = 16
    group_size: int = 4
    groups_per_batch: int = 4
    lag_max: int = 0
    replicas: int = 2
    hosts: int = 2
    write_s: float = 0.002
    deliver_s: float = 0.01  # a stream's message to its reader
    box_s: float = 0.1
    generate_s: float = 2.0
    step_s: float = 1.0
    verify_s: float = 1.0
    train_s: float = 5.0
    done: float = 0.4  # the model says DONE after a turn
    solved: float = 0.4
    # faults
    box_refused: float = 0.0
    box_lost: float = 0.0
    generate_failed: float = 0.0
    verify_failed: float = 0.0
    repeated: float = 0.0  # a write whose reply is lost is written again; a message comes twice
    router_every_s: float = 0.0
    bank_every_s: float = 0.0
    trainer_every_s: float = 0.0


CALM = Model()
ROUGH = Model(
    box_refused=0.1,
    box_lost=0.15,
    generate_failed=0.1,
    verify_failed=0.1,
    repeated=0.1,
    deliver_s=0.5,
    write_s=0.1,
    router_every_s=40.0,
    bank_every_s=25.0,
    trainer_every_s=25.0,
)


def spread(rng: random.Random, mean_s: float) -> float:
    """An exponential time, cut at ten means."""
    return min(rng.expovariate(1.0 / mean_s), 10.0 * mean_s)
