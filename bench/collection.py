"""Time between trainable batches: Muster's machines against how others collect, simulated.

    python -m bench.collection [--quick] [--json PATH] [--report] [--cache DIR] [--jobs N]
    python -m bench.collection --real ...    # real services: bench/collection_real.py

Results of single runs lie in the cache folder until the code that they depend on changes, so a
full run may be stopped and goes on where it was. --report writes docs/results/collection.md and its
plot from the same runs. Targets: bench/targets.toml; what the figures mean: that page.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from bench import _results
from bench.collection_plan import FULL, MAIN, QUICK, SENSITIVE, Plan
from bench.collection_plot import drawn
from bench.collection_report import rendered
from bench.collection_runs import ROOT, Cache, results
from bench.collection_tables import Study, changes, figures, ratios

_CACHE = Path("~/.cache/muster/bench-collection")
_PAGE = ROOT / "docs/results/collection.md"


def settings(plan: Plan) -> dict[str, Any]:
    """What was run."""
    return {
        "quick": plan.quick,
        "arms": list(MAIN),
        "regimes": list(plan.regimes),
        "seeds": list(plan.seeds),
        "batches": plan.batches,
        "lever_arms": list(plan.levers),
        "sensitivity": list(plan.variants),
        "sensitivity_arms": list(SENSITIVE) if plan.variants else [],
        "lever_and_sensitivity_seeds": list(plan.few_seeds),
        "lever_and_sensitivity_batches": plan.few_batches,
    }


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = _results.parser(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--report", action="store_true", help="write the page and the plot, too")
    parser.add_argument("--cache", type=Path, default=_CACHE, help="folder of single results")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    return parser.parse_args()


def main() -> int:
    if sys.argv[1:2] == ["--real"]:
        from bench import collection_real

        return collection_real.main(sys.argv[2:])
    asked = parsed()
    machine = _results.machine()
    plan = QUICK if asked.quick else FULL
    study = Study(plan, results(plan.jobs(), Cache(asked.cache.expanduser()), asked.jobs))
    result = {
        "name": "collection",
        "machine": machine,
        "settings": settings(plan),
        "figures": figures(study) | changes(study),
        "ratios": ratios(study),
    }
    _results.publish(result, asked.json)
    if asked.report:
        _PAGE.write_text("\n".join(rendered(study, machine)) + "\n", "utf-8")
        _PAGE.with_suffix(".svg").write_text(drawn(study), "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
