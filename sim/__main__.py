"""`python -m sim --seed 7 [--seeds N] [--rough]`: run the world and print what happened."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import msgspec

from sim.checks import Violation
from sim.experiment import Result, simulate
from sim.models import CALM, ROUGH


@dataclass
class Arguments:
    """The command line."""

    seed: int = 0
    seeds: int = 1
    rough: bool = False
    json: bool = False


def main() -> int:
    parser = argparse.ArgumentParser(prog="sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds, one after another")
    parser.add_argument("--rough", action="store_true", help="with failures and kills")
    parser.add_argument("--json", action="store_true", help="one JSON object per seed")
    arguments = parser.parse_args(namespace=Arguments())
    model = ROUGH if arguments.rough else CALM
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        try:
            result = simulate(seed, model)
        except Violation as problem:
            sys.stderr.write(f"violation: {problem}\n")
            return 1
        text = msgspec.json.encode(result).decode() if arguments.json else _table(result)
        sys.stdout.write(text + "\n")
    return 0


def _table(result: Result) -> str:
    labels = ", ".join(f"{name} {count}" for name, count in result.labels.items())
    kills = ", ".join(f"{name} {count}" for name, count in result.kills.items()) or "none"
    rows = (
        ("trace", f"{result.trace[:16]} (seed {result.seed}, {result.events} events)"),
        ("simulated", f"{result.end_s:.1f} s, {result.steps} steps"),
        ("groups", f"{result.groups_trained} trained, {result.groups_filtered} filtered"),
        ("attempts", f"{result.attempts}: {labels}"),
        ("kills", kills),
        ("wait", f"{result.wait_mean_s:.1f} s from asking to a batch, mean"),
    )
    return "\n".join(f"{name:<10} {text}" for name, text in rows) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
