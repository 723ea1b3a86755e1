"""Commands that simulate: `muster sim fit` and `muster sim what-if`.

Owns: their options and texts, the processes that simulate. They change nothing of a run: `fit`
reads its record and writes one file, `what-if` reads that file. Exit status: 0, 2 for an error,
130 for Ctrl-C. Does not cover: the model (sim/rollout/fit.py) and the answer (whatif.py), which are
found by name when a command runs: the library never imports the simulation.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from muster.cli.inspect import ConfigOption, JsonOption, RedisOption, StateOption, read, telling

app = typer.Typer(add_completion=False)
sim_app = typer.Typer(no_args_is_help=True, help="Fit a simulation to a run; ask it what if.")
app.add_typer(sim_app, name="sim")

_OUT = Path("model.json")
KvTokens = Annotated[
    int | None, typer.Option("--kv-tokens", min=1, help="Tokens of KV cache of one replica.")
]
Boxes = Annotated[int | None, typer.Option("--boxes", min=1, help="Boxes at a time, of all hosts.")]


@sim_app.command()
def fit(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Run name; default: configuration.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="File for the model.")] = _OUT,
    kv_tokens: KvTokens = None,
    boxes: Boxes = None,
    context_tokens: Annotated[
        int | None, typer.Option("--context-tokens", min=1, help="Longest context of an episode.")
    ] = None,
    turns_max: Annotated[
        int | None, typer.Option("--turns-max", min=1, help="Most turns of an episode.")
    ] = None,
    state_dir: StateOption = None,
    redis: RedisOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Fit the simulation's model to a recorded run, and show how well it fits."""
    from muster.figures import as_json

    with telling():
        record = read(run, state_dir, redis, config)
        fitting, files = import_module("sim.rollout.fit"), import_module("sim.rollout.fit_model")
        given = fitting.Given(
            kv_tokens=kv_tokens, context_limit=context_tokens, turns_max=turns_max, boxes=boxes
        )
        model = fitting.fit(record, given)
        files.write(model, out)
        typer.echo(as_json(model) if json else "\n".join(_fit_lines(model, out)))


def _fit_lines(model: Any, out: Path) -> Iterator[str]:
    yield f"run {model.run}: the model is in {out}"
    yield f"  {'':<20}{'recorded 10 %':>14}{'50 %':>10}{'90 %':>10}   {'as modelled':>14}"
    for name, good in model.goodness.items():
        recorded = "".join(
            f"{value:>{w}.4g}" for value, w in zip(good.recorded, (14, 10, 10), strict=True)
        )
        predicted = "".join(
            f"{value:>{w}.4g}" for value, w in zip(good.predicted, (14, 10, 10), strict=True)
        )
        yield f"  {name:<20}{recorded}   {predicted}   of {good.samples}"
    for note in model.notes:
        yield f"note: {note}"
    yield f"next: muster sim what-if --model {out}"


@sim_app.command("what-if")
def what_if(
    model: Annotated[Path, typer.Option("--model", help="File of `muster sim fit`.")] = _OUT,
    replicas: Annotated[int | None, typer.Option(min=1, max=256, help="Replicas.")] = None,
    boxes: Boxes = None,
    kv_tokens: KvTokens = None,
    groups: Annotated[int | None, typer.Option(min=1, help="Groups in a batch.")] = None,
    group_size: Annotated[int | None, typer.Option(min=2, help="Siblings in a group.")] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Every box starts cold.")] = False,
    gpu_hour_price: Annotated[float, typer.Option(min=0, help="Price of a replica an hour.")] = 0,
    box_hour_price: Annotated[float, typer.Option(min=0, help="Price of a box an hour.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Simulations of each fleet.")] = 1,
    batches: Annotated[int, typer.Option(min=0, help="Batches of each; 0: as many as fit.")] = 0,
    jobs: Annotated[int, typer.Option(min=0, help="Processes; 0: one a core.")] = 0,
    json: JsonOption = False,
) -> None:
    """Time to batch, waiting engines and cost on another fleet; where more of it would help."""
    from muster.figures import as_json

    with telling():
        fitted = import_module("sim.rollout.fit_model").read(model)
        asking = import_module("sim.rollout.whatif")
        question = asking.Question(
            replicas=replicas,
            boxes=boxes,
            kv_tokens=kv_tokens,
            groups=groups,
            group_size=group_size,
            warm=not cold,
            gpu_hour_price=gpu_hour_price,
            box_hour_price=box_hour_price,
            seeds=seeds,
            batches=batches,
        )
        setups = asking.setups(fitted, question)
        results = _simulated(fitted, setups, jobs or len(os.sched_getaffinity(0)))
        found = asking.answer(fitted, question, setups, results)
        typer.echo(as_json(found) if json else "\n".join(_what_if_lines(found)))


def _simulated(model: Any, setups: Sequence[Any], jobs: int) -> list[Any]:
    """Results in the order of the setups; progress on standard error."""
    asked = [(model, setup) for setup in setups]
    if jobs == 1:
        return list(_told(map(_simulate, asked), len(asked)))
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    with context.Pool(min(jobs, len(asked)), initializer=_quiet) as pool:
        return list(_told(pool.imap(_simulate, asked), len(asked)))


def _told(results: Iterable[Any], whole: int) -> Iterator[Any]:
    for number, result in enumerate(results, 1):
        typer.echo(f"{number} of {whole} simulations", err=True)
        yield result


def _quiet() -> None:
    """Ctrl-C is the parent's to act on: it ends its pool."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _simulate(asked: tuple[Any, Any]) -> Any:
    return import_module("sim.rollout.whatif").simulate(*asked)


def _what_if_lines(found: Any) -> Iterator[str]:
    from muster.view import seconds, share

    base = found.base
    kind = "warm" if base.warm else "cold"
    yield (
        f"run {found.run} on {base.replicas} replicas with {base.kv_tokens:,} KV tokens, "
        f"{base.boxes} {kind} boxes ({found.batches} batches, {found.seeds} seeds):"
    )
    yield f"  time to batch      {seconds(base.batch_s)} (the first {seconds(base.first_batch_s)})"
    waits = (
        f"{seconds(base.gpu_wait_s)} a batch, {share(base.gpu_wait_share)} of the replicas' time"
    )
    yield f"  waiting for boxes  {waits}"
    yield f"  engines busy       {share(base.busy)}"
    if base.price_hour:
        yield f"  cost per batch     {base.cost_per_batch:.4g} ({base.price_hour:.4g} an hour)"
    if found.recorded_batch_s:
        yield f"  recorded was       {seconds(found.recorded_batch_s)} on the run's own fleet"
    yield "what would help, the most useful first:"
    for change in found.changes:
        yield f"  {change.fleet.name:<18} {_saved(change)}"
    for note in found.notes:
        yield f"note: {note}"


def _saved(change: Any) -> str:
    from muster.view import seconds

    word = "saves" if change.saves_s >= 0 else "costs"
    text = f"{word} {seconds(abs(change.saves_s))} a batch"
    if change.worth is None:
        return text
    word = "saves" if change.saves_cost >= 0 else "costs"
    return f"{text}, {change.worth:.3g} s for each 1 an hour; {word} {abs(change.saves_cost):.3g}"
