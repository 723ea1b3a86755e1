"""Tables for people out of a result of bench.sandbox: what docs/results/sandbox.md shows.

    python -m bench.sandbox_table RESULT.json > docs/results/sandbox.md

Owns: the form. Promise: every figure shown is in the file, a missing one is a dash. Does not cover:
whether the targets are met (bench.check).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SHOWN = {
    "start": "cold start (empty pool)",
    "fork": "fork (a box from a snapshot)",
    "warm": "warm acquire",
    "step_bash": "step `echo hello`",
    "step_python": "step `python3 -c 'print(1)'`",
    "kill": "kill of a tree that ignores SIGTERM",
    "verify": "verify",
    "release": "release of a box with such a tree",
    "end": "release of an idle box",
}
_OTHERS = {
    "docker": "Docker API (create + start; exec)",
    "boxes_of_rootfs": "native box of the same root file system",
    "swe_rex": "SWE-ReX local runtime (new session; command)",
}
_NOTES = """\
- *Bare* is clone (all namespaces) + overlay + exec of the same command at the same concurrency, and
  nothing else: no limits, filter, capabilities, session, captured output, requests. For a start, a
  fork (overlay on the same layer) and a warm acquire the command is `true`; for the kill it is
  `cgroup.kill` of the same tree until its group is empty. *Bare exec* is fork + chroot + exec
  without a layer: the harder measure for a step, whose box is there already.
- Times are from the beginning of a batch to the end of each; all of a batch are in the same
  operation. The kill of a tree is the time from the limit of a step to its end as the host tells
  it in the answer: when a limit fires no caller can see.
- The service is a process of its own, its keeper another; the client is one asyncio process with
  one channel, so many calls at once wait for each other's Python on both sides. That is part of
  every figure of the boxes and of none of the bare ones. On a machine with two cores client,
  service, keeper and what runs in the boxes share them, as do the bare commands.
- A verification is two ends, a second box and a run of test.sh, and waits for one of the places of
  `sandbox.verifying_max`.
- SWE-ReX's local runtime is a shell of the machine: it isolates, limits and cleans up nothing.
"""


def rendered(result: dict[str, Any]) -> Iterator[str]:
    """The page, line by line."""
    settings, machine = result["settings"], result["machine"]
    yield "# How long boxes take"
    yield ""
    yield (
        "`python -m bench.sandbox --json -` (as root; `--quick` supports no claim) gives these "
        "figures again; `python -m bench.sandbox_table` made this page of them, "
        "`python -m bench.check` judges them."
    )
    yield ""
    yield (
        f"Machine: {machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, Python "
        f"{machine['python']}; load average {machine['load_1m_after']:g} at the end of the run "
        f"(its own among it). {settings['rounds']} rounds of {settings['boxes_alone_per_round']} "
        f"boxes one after the other and {settings['boxes_at_once']} at once, native boxes with "
        f"default settings, through gRPC on loopback, in {settings['seconds']} s."
    )
    figures = result["figures"]
    yield (
        f"{figures['boxes_started']:g} boxes were started by the client, "
        f"{figures['failed_starts']:g} of them failed. Share of warm acquires that a warm box "
        f"answered: {figures['warm_share_alone']:.0%} alone, "
        f"{figures['warm_share_at_once']:.0%} at once."
    )
    many = f"{settings['boxes_at_once']} at once"
    for load, title in (("alone", "One at a time"), ("at_once", many)):
        yield ""
        yield f"## {title}"
        yield ""
        yield from _table(result, load)
    yield ""
    yield "## Beside others, one at a time"
    yield ""
    yield from _beside(result)
    yield ""
    yield _NOTES.rstrip()


def _table(result: dict[str, Any], load: str) -> Iterator[str]:
    figures, ratios = result["figures"], result["ratios"]
    yield (
        "| operation | p50 ms | p99 ms | bare p50 | bare p99 | ratio p50 | ratio p99 | "
        "to bare exec p50 | p99 |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, shown in _SHOWN.items():
        cells = [
            *(_ms(figures.get(f"{name}_{load}_{q}_ms")) for q in ("p50", "p99")),
            *(_ms(figures.get(f"bare_{name}_{load}_{q}_ms")) for q in ("p50", "p99")),
            *(_times(ratios.get(f"{name}_over_bare_{load}_{q}")) for q in ("p50", "p99")),
            *(_times(ratios.get(f"{name}_over_bare_exec_{load}_{q}")) for q in ("p50", "p99")),
        ]
        yield f"| {shown} | {' | '.join(cells)} |"


def _beside(result: dict[str, Any]) -> Iterator[str]:
    figures, ratios = result["figures"], result["ratios"]
    yield "| | start p50 ms | step p50 ms | end p50 ms | start, times ours | step, times ours |"
    yield "|---|---|---|---|---|---|"
    for arm, shown in _OTHERS.items():
        if f"{arm}_start_p50_ms" not in figures:
            continue
        cells = [
            *(_ms(figures.get(f"{arm}_{name}_p50_ms")) for name in ("start", "step_bash", "end")),
            *(_times(ratios.get(f"{arm}_over_boxes_{n}_p50")) for n in ("start", "step_bash")),
        ]
        yield f"| {shown} | {' | '.join(cells)} |"
    for arm, why in result["not_beside"].items():
        yield f"| {_OTHERS[arm]} | not measured: {why} | | | | |"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} ×"


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(__doc__)
        return 2
    for line in rendered(json.loads(Path(arguments[0]).read_text("utf-8"))):
        print(line)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
