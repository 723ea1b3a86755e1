"""Two-speed truth: does fast work crowd out slow work? `python -m sim.two_speed [--lag 0 1 4]`.

Half of the tasks take 1 s and half 30 s. Owns: the scenario and its two figures, both over batches
30 to 130: the share of slow trajectories among the trained, against that among the launched, and
the interval between batches against what the launches would allow. Promise: the real machines
decide; nothing fails here. Does not cover: real engines and boxes (bench/).
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from itertools import islice

import msgspec

from muster.types import Value
from sim.experiment import Bench
from sim.models import Model

WARM_UP, LAST = 30, 130
GROUPS_PER_BATCH = 8


class Figures(Value, frozen=True):
    """Shares in [0, 1], times in seconds."""

    lag_max: int
    slow_dispatched: float
    slow_trained: float
    interval_s: float
    interval_allowed_s: float  # 1.2 x groups per batch / groups launched per second
    lag_seen: int

    @property
    def off_points(self) -> float:
        """Trained against dispatched, in points of a hundred."""
        return 100.0 * abs(self.slow_trained - self.slow_dispatched)

    @property
    def holds(self) -> bool:
        return self.off_points <= 5.0 and self.interval_s <= self.interval_allowed_s


def model(lag_max: int) -> Model:
    """A world in which only the tasks differ in speed."""
    return Model(
        groups=GROUPS_PER_BATCH * (LAST + 12),
        group_size=2,
        groups_per_batch=GROUPS_PER_BATCH,
        lag_max=lag_max,
        boxes_max=128,
        standbys=False,
        box_s=0.05,
        generate_s=0.05,
        verify_s=0.05,
        train_s=0.5,
        publish_s=0.05,
        silly=0.0,
        fast_s=1.0,
        slow_s=30.0,
    )


def measure(lag_max: int, seed: int = 1) -> Figures:
    """Run until the last batch that counts."""
    bench = Bench(seed, model(lag_max))
    launched: list[tuple[float, str]] = []  # when, which task
    opened = bench.checks.facts.opened

    def done() -> bool:
        fresh = len(opened) - len(launched)
        if fresh:
            newest = list(islice(reversed(opened), fresh))
            launched.extend((bench.world.now, opened[group].task) for group in reversed(newest))
        return len(bench.trainer.batches_at) > LAST

    bench.world.run(done, bench.checks, until_s=100_000.0)
    batches = bench.trainer.batches_at
    begin, end = batches[WARM_UP - 1][0], batches[LAST - 1][0]
    dispatched = [task for at, task in launched if begin <= at < end]
    trained = [task for _, _, tasks in batches[WARM_UP:LAST] for task in tasks]
    per_second = len(dispatched) / (end - begin)
    return Figures(
        lag_max=lag_max,
        slow_dispatched=_slow(dispatched),
        slow_trained=_slow(trained),
        interval_s=(end - begin) / (LAST - WARM_UP),
        interval_allowed_s=1.2 * GROUPS_PER_BATCH / per_second,
        lag_seen=bench.leases.lag_max,
    )


def _slow(tasks: list[str]) -> float:
    return sum(task.endswith("slow") for task in tasks) / max(len(tasks), 1)


@dataclass
class Arguments:
    """The command line."""

    lag: tuple[int, ...] = (0, 1, 4)
    json: bool = False


def main() -> int:
    parser = argparse.ArgumentParser(prog="sim.two_speed", description=__doc__)
    parser.add_argument("--lag", type=int, nargs="+", default=(0, 1, 4), help="values of lag_max")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    arguments = parser.parse_args(namespace=Arguments())
    held = True
    for lag_max in arguments.lag:
        figures = measure(lag_max)
        held = held and figures.holds
        sys.stdout.write(_line(figures, as_json=arguments.json) + "\n")
    return 0 if held else 1


def _line(figures: Figures, *, as_json: bool) -> str:
    if as_json:
        return msgspec.json.encode(figures).decode()
    return (
        f"lag_max {figures.lag_max}: {figures.slow_trained:.1%} slow trained, "
        f"{figures.slow_dispatched:.1%} dispatched ({figures.off_points:.1f} points); a batch in "
        f"{figures.interval_s:.2f} s, {figures.interval_allowed_s:.2f} s allowed; lag seen "
        f"{figures.lag_seen}; {'holds' if figures.holds else 'does NOT hold'}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
