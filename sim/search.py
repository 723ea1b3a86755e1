"""Many seeds, and the shrinking of what they find.

Owns: running seeds in order or in several processes, leaving faults out one by one while the
failure stays, the line that plays a failure again. Promise: the figures add up over all seeds,
void ones are counted as void. Does not cover: one run (experiment.py).
"""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor

import msgspec
from msgspec.structs import replace

from muster.types import Value
from sim import states
from sim.experiment import Result, faults_of, simulate
from sim.faults import Fault
from sim.models import ROUGH, Model

Run = Callable[[int, Model, Sequence[Fault] | None], Result]


SMALL_KV_TOKENS = 250
SLOW_STORE_S = 0.15
SLOW_S = 1.0  # a checkpoint, a publication
SHOWN = 20  # violations in a text


class Summary(Value, frozen=True):
    """What many seeds came to."""

    seeds: int
    void: int
    faults: int
    fired: dict[str, int]
    reach: dict[str, int]
    episodes: int
    steps: int
    replays: int
    refused_writes: int
    fenced_calls: int
    overlapped: int
    events: int
    simulated_s: float
    violations: tuple[str, ...]


def run_one(seed: int, model: Model, faults: Sequence[Fault] | None = None) -> Result:
    """A run whose bugs are problems too: an exception in a machine is a violation."""
    try:
        return simulate(seed, of_seed(seed, model), faults)
    except Exception as error:  # noqa: BLE001 - whatever a machine raises is what is looked for
        where = traceback.extract_tb(error.__traceback__)[-1]
        told = (
            f"{type(error).__name__}: {error} ({where.filename.rpartition('/')[2]}:{where.lineno})"
        )
        none: dict[str, int] = {}
        return Result(
            seed,
            "",
            0,
            0.0,
            0,
            0,
            0,
            0,
            0,
            False,
            0,
            none,
            none,
            none,
            0,
            0,
            0,
            0,
            0,
            problem=f"raised {told}",
        )


def of_seed(seed: int, model: Model) -> Model:
    """The setting of one seed of a world with faults.

    Every fourth has a store that may lose its last second, every fourth replicas with less room
    than one long conversation needs; a third has a slow store, a third slow training and
    publication; every other one small batches; in two of five seeds training and publication
    overlap, in two the policy drifts (groups are scored, refused and given back), in one an
    evaluation runs beside them. So short states last, and what needs many steps comes early.
    """
    if not model.faults_mean:
        return model
    if seed % 3 == 0:
        model = replace(model, store_s=SLOW_STORE_S)
    elif seed % 3 == 1:
        model = replace(model, train_s=3 * model.train_s, publish_s=SLOW_S, save_s=SLOW_S)
    if seed % 5 > 2:
        model = replace(model, returns=0.3, step_kl=0.01, kl_refuse=0.06)
    if seed // 12 % 2:
        model = replace(model, groups_per_batch=min(model.groups_per_batch, 2))
    if seed % 5 in (1, 3):
        model = replace(model, ahead_max=1 + seed // 5 % 2)
    if seed % 5 == 2:
        model = replace(model, evaluated=6)
    if seed % 4 == 1:
        return replace(model, kv_tokens=min(model.kv_tokens, SMALL_KV_TOKENS))
    return replace(model, power_cuts=True) if seed % 4 == 3 else model


def run_many(seeds: Sequence[int], model: Model, jobs: int = 1) -> Iterator[Result]:
    """In order of seeds; `jobs` processes."""
    if jobs <= 1:
        for seed in seeds:
            yield run_one(seed, model)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(run_one, seeds, [model] * len(seeds), chunksize=4)


def faultsearch(
    seeds: int, model: Model = ROUGH, *, first: int = 0, jobs: int = 1, until_first: bool = False
) -> Summary:
    """Run so many seeds; `until_first` stops at the first violation."""
    found: list[Result] = []
    for result in run_many(range(first, first + seeds), model, jobs):
        found.append(result)
        if result.problem and until_first:
            break
    return summed(found)


def summed(results: Sequence[Result]) -> Summary:
    fired: Counter[str] = Counter()
    reach: Counter[str] = Counter()
    for result in results:
        fired.update(result.fired)
        reach.update(result.reach)
    return Summary(
        seeds=len(results),
        void=sum(r.void for r in results),
        faults=fired.total(),
        fired=dict(sorted(fired.items())),
        reach=dict(sorted(reach.items())),
        episodes=sum(r.episodes for r in results),
        steps=sum(r.steps for r in results),
        replays=sum(r.replays for r in results),
        refused_writes=sum(r.refused_writes for r in results),
        fenced_calls=sum(r.fenced_calls for r in results),
        overlapped=sum(r.overlapped for r in results),
        events=sum(r.events for r in results),
        simulated_s=sum(r.end_s for r in results),
        violations=tuple(f"seed {r.seed}: {r.problem}" for r in results if r.problem),
    )


def invariant(problem: str) -> str:
    """What a problem is about, so that shrinking keeps to one: its number, or its exception."""
    told = problem.partition(" s: ")[2] or problem
    return told.split(" ")[1] if told.startswith("raised") else told.partition(":")[0]


def shrink(
    seed: int, model: Model, *, most: int = 200, run: Run | None = None
) -> tuple[tuple[int, ...], Result]:
    """The numbers of the faults that a failure needs (as far as `most` runs tell), and its run."""
    run, model = run or run_one, of_seed(seed, model)
    faults = faults_of(seed, model)
    best = run(seed, model, None)
    kept, wanted, size = list(range(len(faults))), invariant(best.problem), len(faults) // 2
    while size >= 1 and most > 0:
        at = 0
        while at < len(kept) and most > 0:
            tried = kept[:at] + kept[at + size :]
            result = run(seed, model, [faults[n] for n in tried])
            most -= 1
            if result.problem and invariant(result.problem) == wanted:
                kept, best = tried, result
            else:
                at += size
        size = size // 2
    return tuple(kept), best


def replay_line(seed: int, kept: Sequence[int], options: str) -> str:
    """The command that plays a failure again."""
    numbers = ",".join(map(str, kept)) or "none"
    return f"python -m sim --seed {seed} --faults {numbers}{options}"


def told(summary: Summary) -> str:
    """For people."""
    fired = ", ".join(f"{name} {count}" for name, count in summary.fired.items())
    lines = [
        f"{summary.seeds} seeds ({summary.void} void), {summary.faults} faults: {fired}",
        f"{summary.episodes} episodes, {summary.steps} steps ({summary.overlapped} begun while a "
        f"version was sent), {summary.replays} boxes rebuilt, "
        f"{summary.refused_writes} late writes and {summary.fenced_calls} late calls refused",
        f"{summary.events} events, {summary.simulated_s:.0f} s simulated, "
        f"{len(summary.reach)} of fault x state reached, "
        f"{len(summary.violations)} violations",
    ]
    lines += phases(summary.reach)
    if summary.faults:
        lines += states.table(summary.reach)
    shown = summary.violations[:SHOWN]
    more = len(summary.violations) - len(shown)
    return "\n".join([*lines, *shown, *([f"… and {more} more"] if more else [])])


def phases(reach: Mapping[str, int]) -> list[str]:
    """One line for each call that an episode waited for when something was struck: by what."""
    by: dict[str, list[str]] = {}
    for at, count in reach.items():
        kind, found, call = at.partition("@")
        if found:
            by.setdefault(call, []).append(f"{kind} {count}")
    return [f"  {call:<15} {', '.join(kinds)}" for call, kinds in sorted(by.items())]


def write_json(value: object, path: str) -> None:
    """To a file, or to standard output for `-`."""
    text = msgspec.json.format(msgspec.json.encode(value)).decode() + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
