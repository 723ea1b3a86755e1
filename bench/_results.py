"""What every benchmark does with its figures: statistics, the machine, table and JSON.

Owns: the form of a result file, {"name", "machine", "settings", "figures", "ratios"}: flat, the
unit in the name. Promise: a ratio is made of figures of the same run only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def quantile(values: Sequence[float], q: float) -> float:
    """The value below which a share `q` of `values` lies; linear between neighbours."""
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1m_before": round(os.getloadavg()[0], 2),
    }


def parser(description: str) -> argparse.ArgumentParser:
    """--quick and --json PATH|-."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--quick", action="store_true", help="a short run that supports no claim")
    made.add_argument("--json", metavar="PATH", help="write the result there; - for stdout")
    return made


def arguments(description: str) -> argparse.Namespace:
    """Of a benchmark that takes no others."""
    return parser(description).parse_args()


def publish(result: dict[str, Any], to: str | None) -> None:
    """The table for people (on stderr when JSON goes to stdout), and the JSON if asked for."""
    shown = sys.stderr if to == "-" else sys.stdout
    rows = [("machine", result["machine"]), ("settings", result["settings"])]
    for title, content in rows:
        print(f"{title}: " + ", ".join(f"{k} {v}" for k, v in content.items()), file=shown)
    width = max(len(name) for name in (*result["figures"], *result["ratios"]))
    for part in ("figures", "ratios"):
        print(f"{part}:", file=shown)
        for name, value in result[part].items():
            print(f"  {name:<{width}}  {value:>9.2f}", file=shown)
    text = json.dumps(result, indent=1)
    if to == "-":
        print(text)
    elif to:
        Path(to).write_text(text + "\n", "utf-8")
