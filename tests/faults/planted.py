"""`python -m tests.faults.planted --seeds 200`: planted bugs that fault seeds alone must catch.

Owns: the hunt. Promise: for each bug the seeds run in order until one of them does not hold; a bug
counts as caught when a check that it breaks says so; first some seeds run without a bug, where all
must hold. Prints the first seed that caught it, and by what; the exit status is 1 when a bug
survived, 2 when the world does not hold without one. Does not cover: what is planted (plants.py).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from muster.types import Value
from sim import models
from sim.models import Model
from sim.search import run_one
from tests.faults.planting import Bug, planted
from tests.faults.plants import BUGS

_SOUND = 4
_ROW = "{:<34} {:>5}  {}"


class Caught(Value, frozen=True):
    """`seed` is -1 when none of the seeds saw it."""

    bug: str
    seed: int
    problem: str


@dataclass
class Arguments:
    """The command line."""

    seeds: int = 200
    jobs: int = 1
    only: list[str] = field(default_factory=list)


def hunt(bug: Bug, seeds: int) -> Caught:
    """Play seeds with the bug until one of its checks sees it."""
    model: Model = getattr(models, bug.model)
    with planted(bug):
        for seed in range(seeds):
            problem = run_one(seed, model).problem
            if problem and re.search(rf"(?<!\d)(?:{bug.caught})", problem):
                return Caught(bug.name, seed, problem)
            if problem:
                return Caught(bug.name, -1, f"seen otherwise, at seed {seed}: {problem}")
    return Caught(bug.name, -1, "not caught")


def _named(name: str, seeds: int) -> Caught:
    return hunt(next(bug for bug in BUGS if bug.name == name), seeds)


def _all(bugs: list[Bug], seeds: int, jobs: int) -> Iterator[Caught]:
    names = [bug.name for bug in bugs]
    if jobs <= 1:
        yield from (_named(name, seeds) for name in names)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(_named, names, [seeds] * len(names))


def main() -> int:
    parser = argparse.ArgumentParser(prog="planted", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="at most, for one bug")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--only", nargs="+", default=[], help="parts of names")
    arguments = parser.parse_args(namespace=Arguments())
    bugs = [b for b in BUGS if not arguments.only or any(o in b.name for o in arguments.only)]
    for name in sorted({bug.model for bug in bugs}):
        for seed in range(_SOUND):
            problem = run_one(seed, getattr(models, name)).problem
            if problem:
                _say(f"{name} does not hold without a bug, seed {seed}: {problem}")
                return 2
    _say(_ROW.format("planted", "seed", "caught by"))
    survived = 0
    for caught in _all(bugs, arguments.seeds, arguments.jobs):
        _say(_ROW.format(caught.bug, caught.seed, caught.problem[:150]))
        survived += caught.seed < 0
    _say(f"{len(bugs)} planted, {survived} survived")
    return 1 if survived else 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
