"""Declares `muster eval`. Imports nothing heavy. Does not cover: what it does (evaluating.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False)

RouterAddress = Annotated[
    str, typer.Option("--router", help="Address of the router, or several with commas.")
]
UpConfig = Annotated[
    Path | None,
    typer.Option("--config", help="Settings of the `muster up` that is meant.", metavar="FILE"),
]
UpState = Annotated[
    Path | None,
    typer.Option("--state-dir", help="State folder of the `muster up` that is meant."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line, for programs.")]


@app.command("eval")
def evaluate(
    path: Annotated[
        Path | None, typer.Argument(help="Task set; without it, the bundled one.")
    ] = None,
    split: Annotated[str, typer.Option(help="Tasks to take: train, eval, limits or all.")] = "eval",
    samples: Annotated[int, typer.Option(min=1, help="Samples of each task.")] = 16,
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds over the tasks, each with instances of its own.")
    ] = 1,
    instances: Annotated[
        int, typer.Option(metavar="SEED", min=0, help="First held-out instance of each task.")
    ] = 0,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0: the likeliest token each time.")
    ] = 1.0,
    top_p: Annotated[float, typer.Option(help="Of the likeliest tokens, this share.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="So many of the likeliest tokens; 0: all.")] = 0,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="A model folder or checkpoint, on services that are started for it and stopped "
            "after it; without it, what a running `muster up` serves.",
        ),
    ] = None,
    job: Annotated[
        str, typer.Option(metavar="JOB", help="An evaluation that was begun before.")
    ] = "",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep the result there, as JSON.")
    ] = None,
    router: RouterAddress = "",
    config: UpConfig = None,
    state_dir: UpState = None,
    as_json: Json = False,
) -> None:
    """Evaluate on held-out tasks, served as in training; nothing of it is trained on."""
    from muster.cli.evaluating import EvalOptions, evaluate_model, one_or_the_other
    from muster.cli.evaluating import evaluate as run
    from muster.cli.jobs import Where

    options = EvalOptions(
        path, split, samples, rounds, instances, temperature, top_p, top_k, job, out
    )
    where = Where(router, config, state_dir)
    if model is not None:
        one_or_the_other(options, where)
        code = evaluate_model(options, model, config_path=config, as_json=as_json)
    else:
        code = run(options, where=where, as_json=as_json)
    raise typer.Exit(code)
