"""Does it learn? Real engine, real boxes, real training on fresh instances of easy tasks.

    python -m bench.learn --arm main --seed 1 --json docs/results/learning/main-1.json

Tries the untrained model on held-out instances at three temperatures, trains it on others, and
tries it again on the held-out ones. Stopped at any moment it goes on where it was when it is called
again with the same state folder. The recipe was fixed on seed 0 (bench/_learn_plan.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from bench import _learn_plan as plan
from bench import _results
from bench._learn_page import written
from bench._learn_plot import drawn
from bench._learn_run import Run, Stopped
from muster.errors import MusterError

_DOCS = Path(__file__).parents[1] / "docs" / "results"
_MODEL = "smollm2-135m-instruct"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 when it cannot go on, 130 when it was stopped and can."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--arm", choices=sorted(plan.ARMS), default="main")
    made.add_argument("--seed", type=int, default=1, help="1 and 2 are judged, 0 was for tuning")
    made.add_argument("--state-dir", type=Path, help="default: .muster/learn/ARM-SEED")
    made.add_argument("--json", type=Path, help="write the result there when the run ends")
    made.add_argument("--report", action="store_true", help="the page from the results, no run")
    asked = made.parse_args(arguments)
    if asked.report:
        return reported(_DOCS)
    folder = asked.state_dir or Path(".muster/learn") / f"{asked.arm}-{asked.seed}"
    try:
        plan.check_seed(asked.seed)
        folder.mkdir(parents=True, exist_ok=True)
        found = Run(plan.ARMS[asked.arm], asked.seed, plan.RECIPE, folder, _MODEL).go()
    except Stopped:
        print(f"stopped; the same command goes on from {folder}", file=sys.stderr)
        return 130
    except MusterError as error:
        print(error, file=sys.stderr)
        return 1
    told = result(found)
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(told, indent=1) + "\n", "utf-8")
    print(json.dumps(told["figures"], indent=1))
    return 0


def reported(docs: Path) -> int:
    """Write page and plot from the results that lie below; without any, the page says so."""
    files = [json.loads(path.read_text("utf-8")) for path in docs.glob("learning/*.json")]
    results = {(one["settings"]["arm"], one["settings"]["seed"]): one for one in files}
    (docs / "learning.md").write_text(written(results), "utf-8")
    if results:
        (docs / "learning.svg").write_text(drawn(results), "utf-8")
    return 0


def result(found: dict[str, Any]) -> dict[str, Any]:
    """A run's state as its result: what was asked, what it cost, what it found."""
    return {
        "name": "learn",
        "machine": _results.machine(),
        "settings": {key: found[key] for key in ("arm", "seed", "recipe", "starts")},
        "figures": figures(found),
        "phases": found["phases"],
        "before": found["before"],
        "training": {k: v for k, v in found["training"].items() if k != "checkpoint"},
        "after": found["after"],
    }


def figures(found: dict[str, Any]) -> dict[str, float]:
    """The gain over the untrained model's best temperature, in points, and what it took."""
    rates = {
        phase: {t: _rate(found[phase][f"{t:g}"]) for t in plan.TEMPERATURES}
        for phase in ("before", "after")
    }
    best = max(plan.TEMPERATURES, key=lambda t: rates["before"][t])
    told = {"best_temperature": best}
    for phase, by in rates.items():
        told |= {f"{phase}_{t:g}_percent": rate for t, rate in by.items()}
    told["gain_points"] = round(rates["after"][best] - rates["before"][best], 1)
    for unit in ("cpu_s", "wall_s"):
        told[unit] = round(sum(spent[unit] for spent in found["phases"].values()))
    return told


def _rate(told: dict[str, Any]) -> float:
    """Mean of the tasks' pass rates, in per cent."""
    rates: list[float] = [passed / samples for passed, samples in told["tasks"].values()]
    return round(100 * fmean(rates), 1)


if __name__ == "__main__":
    raise SystemExit(main())
