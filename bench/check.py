"""Judges result files of benchmarks by bench/targets.toml.

    python -m bench.check FILE…

Owns: the comparison. Promise: exit 0 when every target of each named bench is met by a full run, 1
otherwise, 2 without any file; a figure that is missing or no number is a miss, and so is a bench
that has no targets; a quick run supports no claim and is said to be one.
"""

from __future__ import annotations

import json
import math
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TARGETS = Path(__file__).with_name("targets.toml")


def judged(result: dict[str, Any], targets: dict[str, dict[str, float]]) -> Iterator[str]:
    """One line for each target that the result misses."""
    found = {**result.get("figures", {}), **result.get("ratios", {})}
    for name, bound in targets.items():
        value = found.get(name)
        if value is None:
            yield f"{name} is missing"
        elif math.isnan(value):
            yield f"{name} is no number"
        elif value < bound.get("min", value):
            yield f"{name} is {value:g}, at least {bound['min']:g} is wanted"
        elif value > bound.get("max", value):
            yield f"{name} is {value:g}, at most {bound['max']:g} is wanted"


def wanted(name: str) -> dict[str, dict[str, float]]:
    """The targets of one bench."""
    found: dict[str, dict[str, float]] = tomllib.loads(TARGETS.read_text("utf-8"))[name]
    return found


def main(files: list[str]) -> int:
    if not files:
        print(__doc__)
        return 2
    targets = tomllib.loads(TARGETS.read_text("utf-8"))
    missed = False
    for file in files:
        result = json.loads(Path(file).read_text("utf-8"))
        name = result["name"]
        if name not in targets:
            print(f"{file}: no targets for bench {name!r}: nothing says that it is good")
            missed = True
            continue
        wrong = [*judged(result, targets[name])]
        if result.get("settings", {}).get("quick"):
            wrong.append("a quick run supports no claim")
        print(f"{file}: {name}: " + ("; ".join(wrong) if wrong else "all targets met"))
        missed = missed or bool(wrong)
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
