"""`python -m sim --seeds 200`: run the world under faults, check what must hold, say what happened.

A failure is shrunk to the faults that it needs and printed as one line that plays it again:
`python -m sim --seed N --faults 3,7`. `--calm` leaves all faults out, `--list` names those of a
seed, `--lines` shows its events. Exit status 1 when something did not hold, 2 when more than a
tenth of the seeds were void.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from dataclasses import dataclass

from msgspec.structs import replace

from sim import search
from sim.checks import Violation
from sim.experiment import Bench, Result, faults_of, result_of
from sim.models import CALM, ROUGH, Model
from sim.world import Line

VOID_SHARE_MAX = 0.1


@dataclass
class Arguments:
    """The command line."""

    seed: int | None = None
    faults: str = ""
    seeds: int = 1
    first: int = 0
    jobs: int = 1
    rough: bool = False
    calm: bool = False
    everysec: bool = False
    lag: int | None = None
    checkpoint_every: int | None = None
    until_first: bool = False
    no_shrink: bool = False
    list: bool = False
    lines: int = 0
    json: str = ""


def main() -> int:
    arguments = _parsed()
    model = _model(arguments)
    if arguments.seed is not None:
        return _one(arguments, model)
    summary = search.faultsearch(
        arguments.seeds,
        model,
        first=arguments.first,
        jobs=arguments.jobs,
        until_first=arguments.until_first,
    )
    if arguments.json:
        search.write_json(summary, arguments.json)
    if arguments.json != "-":
        sys.stdout.write(search.told(summary) + "\n")
    if summary.violations:
        if not arguments.no_shrink:
            _tell_shrunk(int(summary.violations[0].split()[1].rstrip(":")), model, arguments)
        return 1
    return 2 if summary.void > VOID_SHARE_MAX * summary.seeds else 0


def _parsed() -> Arguments:
    parser = argparse.ArgumentParser(prog="sim", description=__doc__)
    add = parser.add_argument
    add("--seed", type=int, help="play this one seed")
    add("--faults", default="", help="with --seed: only the faults of these numbers, or `none`")
    add("--seeds", type=int, default=1, help="how many seeds")
    add("--from", dest="first", type=int, default=0, help="the first of them")
    add("--jobs", type=int, default=1, help="processes")
    add("--rough", action="store_true", help="with faults (this is the default)")
    add("--calm", action="store_true", help="without faults")
    add(
        "--everysec",
        action="store_true",
        help="power cuts may lose the store's last second in each seed, not only in every fourth",
    )
    add("--lag", type=int, help="lag_max of the router")
    add("--checkpoint-every", type=int, help="steps between checkpoints")
    add("--until-first", action="store_true", help="stop at the first violation")
    add("--no-shrink", action="store_true", help="do not shrink the first violation")
    add("--list", action="store_true", help="with --seed: name its faults")
    add("--lines", type=int, default=0, help="with --seed: show so many last events")
    add("--json", default="", help="write the figures to this file, `-` for standard output")
    return parser.parse_args(namespace=Arguments())


def _model(arguments: Arguments) -> Model:
    model = CALM if arguments.calm else ROUGH
    if arguments.everysec:
        model = replace(model, power_cuts=True)
    if arguments.lag is not None:
        model = replace(model, lag_max=arguments.lag)
    if arguments.checkpoint_every is not None:
        model = replace(model, checkpoint_every=arguments.checkpoint_every)
    return model


def _options(arguments: Arguments) -> str:
    text = " --calm" if arguments.calm else ""
    text += " --everysec" if arguments.everysec else ""
    text += f" --lag {arguments.lag}" if arguments.lag is not None else ""
    every = arguments.checkpoint_every
    return text + (f" --checkpoint-every {every}" if every is not None else "")


def _one(arguments: Arguments, model: Model) -> int:
    assert arguments.seed is not None
    model = search.of_seed(arguments.seed, model)
    faults = faults_of(arguments.seed, model)
    if arguments.list:
        for number, fault in enumerate(faults):
            sys.stdout.write(f"{number}: {fault}\n")
        return 0
    chosen = [int(n) for n in arguments.faults.split(",") if n not in ("", "none")]
    kept = [faults[n] for n in chosen] if arguments.faults else list(faults)
    bench = Bench(arguments.seed, model)
    lines: deque[Line] = deque(maxlen=arguments.lines or 1)
    if arguments.lines:
        bench.world.tell = lines.append
    bench.plan(kept)
    problem = ""
    try:
        bench.run()
    except Violation as found:
        problem = str(found)
    except Exception:
        _show(lines, arguments)
        raise
    _show(lines, arguments)
    sys.stdout.write(_table(result_of(bench, arguments.seed, len(kept), problem)) + "\n")
    return 1 if problem else 0


def _show(lines: deque[Line], arguments: Arguments) -> None:
    if arguments.lines:
        for line in lines:
            sys.stdout.write(f"{line.at:9.3f} {line.who}: {line.text}\n")


def _tell_shrunk(seed: int, model: Model, arguments: Arguments) -> None:
    kept, result = search.shrink(seed, model)
    faults = faults_of(seed, search.of_seed(seed, model))
    sys.stdout.write(f"\nseed {seed} shrinks to {len(kept)} of {len(faults)} faults:\n")
    for number in kept:
        sys.stdout.write(f"  {number}: {faults[number]}\n")
    sys.stdout.write(f"  {result.problem}\n")
    sys.stdout.write(search.replay_line(seed, kept, _options(arguments)) + "\n")


def _table(result: Result) -> str:
    labels = ", ".join(f"{name} {count}" for name, count in result.labels.items())
    fired = ", ".join(f"{name} {count}" for name, count in result.fired.items()) or "none"
    rows = (
        ("trace", f"{result.trace[:16]} (seed {result.seed}, {result.events} events)"),
        ("simulated", f"{result.end_s:.1f} s, {result.steps} steps"),
        ("groups", f"{result.groups_trained} trained, {result.groups_filtered} filtered"),
        ("episodes", f"{result.episodes}: {labels}"),
        ("boxes", f"{result.replays} rebuilt"),
        ("faults", fired),
        ("refused", f"{result.refused_writes} writes, {result.fenced_calls} calls"),
        ("result", result.problem or ("void: too few episodes" if result.void else "all held")),
    )
    return "\n".join(f"{name:<10} {text}" for name, text in rows)


if __name__ == "__main__":
    raise SystemExit(main())
