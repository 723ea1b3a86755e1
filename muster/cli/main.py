"""Declares the commands. Imports nothing heavy, so that `muster --help` answers at once.

Promise: an expected failure is one line on stderr, "field = value: problem → way out", with --json
also an object on stdout ({"event": "error", …}), and exit status 2; Ctrl-C in the middle of work is
status 130. Does not cover: what the commands do.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from muster.clean import clean
from muster.cli.doctor import app as doctor_app
from muster.cli.eval import app as eval_app
from muster.cli.explain import app as explain_app
from muster.cli.hosts import app as hosts_app
from muster.cli.inspect import app as inspect_app
from muster.cli.sim import app as sim_app
from muster.errors import MusterError

app = typer.Typer(
    help="Collect complete, trustworthy batches of agent rollouts for reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
tasks_app = typer.Typer(help="Look after task sets.", no_args_is_help=True)
app.add_typer(tasks_app, name="tasks")

ConfigPath = Annotated[
    Path | None, typer.Option("--config", help="TOML file; without it, defaults.", metavar="FILE")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line, for programs.")]
RouterAddress = Annotated[
    str,
    typer.Option(
        "--router",
        help="Address of the router, or several with commas; "
        "without it, that of this machine's `muster up`, else 127.0.0.1:7400.",
        show_default=False,
    ),
]
UpConfig = Annotated[
    Path | None,
    typer.Option("--config", help="Settings of the `muster up` that is meant.", metavar="FILE"),
]
UpState = Annotated[
    Path | None,
    typer.Option("--state-dir", help="State folder of the `muster up` that is meant."),
]
Volatile = Annotated[
    bool,
    typer.Option("--allow-volatile", help="Accept a Redis that loses more than two seconds."),
]
_ROUTER = ""


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"muster {version('muster-rl')}")
        raise typer.Exit


@app.callback()
def every_command(
    show_version: Annotated[
        bool,
        typer.Option("--version", help="The version.", is_eager=True, callback=_show_version),
    ] = False,
) -> None:
    """Options that stand before the command; `show_version` has ended it already."""
    del show_version


@app.command()
def up(
    config: ConfigPath = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, show what would be started.")
    ] = False,
    standby: Annotated[
        bool,
        typer.Option("--standby", help="A second router and bank that take over at once."),
    ] = False,
    without: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SERVICE", help="Not this one: `trainer` where yours trains; may be repeated."
        ),
    ] = None,
    allow_volatile: Volatile = False,
    as_json: Json = False,
) -> None:
    """Start the services on this machine; Ctrl-C stops them."""
    from muster.cli.up import up as run

    raise typer.Exit(
        run(
            config,
            dry_run=dry_run,
            as_json=as_json,
            standby=standby,
            without=without or (),
            allow_volatile=allow_volatile,
        )
    )


@app.command()
def submit(
    path: Annotated[Path, typer.Argument(help="A task folder, or a folder of task folders.")],
    groups: Annotated[
        int, typer.Option(help="Groups to collect, 1 or more; tasks are taken in turn.")
    ] = 4,
    group_size: Annotated[int, typer.Option(help="Siblings in each group, 2 or more.")] = 4,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 1.0,
    split: Annotated[
        str, typer.Option(help="Tasks to take: train, eval, limits or all.")
    ] = "train",
    instances: Annotated[
        int | None,
        typer.Option(metavar="SEED", help="A fresh instance for each group, from this seed on."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Of this job, once for each: repairs_max (0 or more attempts of a sibling after "
            "the first), valid_min (siblings that a group needs), zero_variance (train or filter), "
            "infra_ceiling (0 to 1).",
        ),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the job to its end.")] = False,
    router: RouterAddress = _ROUTER,
    config: UpConfig = None,
    state_dir: UpState = None,
    as_json: Json = False,
) -> None:
    """Submit a task set; prints the name of the job."""
    from muster.cli.jobs import Where
    from muster.cli.jobs import submit as run

    raise typer.Exit(
        run(
            path,
            groups=groups,
            group_size=group_size,
            temperature=temperature,
            wait=wait,
            where=Where(router, config, state_dir),
            as_json=as_json,
            split=split,
            instances=instances,
            policy=policy or (),
        )
    )


@app.command()
def watch(
    job: Annotated[str, typer.Argument(help="Name of the job.")],
    router: RouterAddress = _ROUTER,
    config: UpConfig = None,
    state_dir: UpState = None,
    as_json: Json = False,
) -> None:
    """Follow a job to its end."""
    from muster.cli.jobs import Where
    from muster.cli.jobs import watch as run

    raise typer.Exit(run(job, where=Where(router, config, state_dir), as_json=as_json))


@app.command()
def cancel(
    job: Annotated[str, typer.Argument(help="Name of the job.")],
    router: RouterAddress = _ROUTER,
    config: UpConfig = None,
    state_dir: UpState = None,
    as_json: Json = False,
) -> None:
    """Stop a job; its open groups are given up."""
    from muster.cli.jobs import Where
    from muster.cli.jobs import cancel as run

    raise typer.Exit(run(job, where=Where(router, config, state_dir), as_json=as_json))


@app.command()
def replay(
    episode: Annotated[str, typer.Argument(help="GROUP.SIBLING.ATTEMPT, as reports show it.")],
    run: Annotated[str | None, typer.Option(help="Run name; default: configuration.")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="State folder of the run.")] = None,
    redis: Annotated[str | None, typer.Option(help="Server address; skips looking.")] = None,
    config: ConfigPath = None,
    as_json: Json = False,
) -> None:
    """Run an episode's commands again in a fresh box; show what differs. Exit 1 on differences."""
    from muster.cli.replay import replay as run_again

    raise typer.Exit(
        run_again(
            episode,
            run=run,
            state_dir=state_dir,
            redis_url=redis,
            config_path=config,
            as_json=as_json,
        )
    )


@app.command()
def demo(
    batches: Annotated[int, typer.Option(min=1, help="Batches to train.")] = 2,
    groups_per_batch: Annotated[int, typer.Option(min=1, help="Groups in a batch.")] = 4,
    group_size: Annotated[int, typer.Option(help="Siblings in a group.")] = 4,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 0.7,
    replicas: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Inference replicas; without it, as configured."),
    ] = None,
    tasks: Annotated[
        Path | None, typer.Option(help="Task set; without it, the bundled one.")
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="Longest wait for the batches.")] = 1800.0,
    config: ConfigPath = None,
    allow_volatile: Volatile = False,
    as_json: Json = False,
) -> None:
    """Everything once: start, collect batches, train, publish, report, stop."""
    from muster.cli.demo import DemoOptions
    from muster.cli.demo import demo as run

    options = DemoOptions(
        batches, groups_per_batch, group_size, temperature, timeout_s, replicas or 0
    )
    raise typer.Exit(
        run(
            options,
            tasks=tasks,
            config_path=config,
            as_json=as_json,
            allow_volatile=allow_volatile,
        )
    )


@tasks_app.command("check")
def tasks_check(
    path: Annotated[Path, typer.Argument(help="A task folder, or a folder of task folders.")],
    seeds: Annotated[
        int, typer.Option(min=1, max=1000, help="Instances of each task with parameters.")
    ] = 1,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="All that was kept of what wrong tries printed.")
    ] = False,
    config: ConfigPath = None,
    as_json: Json = False,
) -> None:
    """Try each task in boxes: nothing → 0, wrong solution → 0, right one → 1.

    Starts a sandbox of its own (as root) and keeps its state in the folder `check` of the state
    folder (.muster/check). Exit status: 0 all is right; 1 a reward is wrong, or a task is refused;
    2 nothing could be tried.
    """
    from muster.cli.check import check as run

    raise typer.Exit(run(path, seeds=seeds, config_path=config, as_json=as_json, verbose=verbose))


# `report`, `audit` and `journal verify`: what only looks at a run stands apart.
app.registered_commands += inspect_app.registered_commands
app.registered_groups += inspect_app.registered_groups
app.registered_commands += eval_app.registered_commands
app.registered_commands += explain_app.registered_commands
app.registered_commands += hosts_app.registered_commands
app.registered_commands += doctor_app.registered_commands
app.registered_groups += sim_app.registered_groups


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script; always leaves by SystemExit."""
    as_json = "--json" in (sys.argv[1:] if arguments is None else arguments)
    try:
        app(args=arguments)
    except MusterError as error:
        sys.exit(_refused(error, as_json))
    except BaseExceptionGroup as group:
        wanted, bugs = group.split(MusterError)
        if bugs is not None or wanted is None:
            raise
        sys.exit(max(_refused(leaf, as_json) for leaf in _leaves(wanted)))
    except KeyboardInterrupt:
        sys.exit(130)


def _refused(error: BaseException, as_json: bool) -> int:
    print(clean(str(error)), file=sys.stderr)
    if as_json and isinstance(error, MusterError):
        names = ("problem", "field", "value", "way_out")
        parts = {name: clean(str(getattr(error, name))) for name in names}
        print(json.dumps({"event": "error", "kind": type(error).__name__, **parts}), flush=True)
    return 2


def _leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in _leaves(inner)]


if __name__ == "__main__":
    main()
