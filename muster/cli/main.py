"""Declares the commands. Imports nothing heavy, so that `muster --help` answers at once.

Promise: an expected failure is one line on stderr, "field = value: problem → way out", and exit
status 2; Ctrl-C in the middle of work is status 130. Does not cover: what the commands do.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from muster.cli.inspect import app as inspect_app
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
RouterAddress = Annotated[str, typer.Option("--router", help="Address of the router.")]
_ROUTER = "127.0.0.1:7400"


@app.command()
def up(
    config: ConfigPath = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, show what would be started.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Start the services on this machine; Ctrl-C stops them."""
    from muster.cli.up import up as run

    raise typer.Exit(run(config, dry_run=dry_run, as_json=as_json))


@app.command()
def submit(
    path: Annotated[Path, typer.Argument(help="A task folder, or a folder of task folders.")],
    groups: Annotated[int, typer.Option(help="Groups to collect; tasks are taken in turn.")] = 4,
    group_size: Annotated[int, typer.Option(help="Siblings in each group.")] = 4,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 1.0,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the job to its end.")] = False,
    router: RouterAddress = _ROUTER,
    as_json: Json = False,
) -> None:
    """Submit a task set; prints the name of the job."""
    from muster.cli.jobs import submit as run

    raise typer.Exit(
        run(
            path,
            groups=groups,
            group_size=group_size,
            temperature=temperature,
            wait=wait,
            router=router,
            as_json=as_json,
        )
    )


@app.command()
def watch(
    job: Annotated[str, typer.Argument(help="Name of the job.")],
    router: RouterAddress = _ROUTER,
    as_json: Json = False,
) -> None:
    """Follow a job to its end."""
    from muster.cli.jobs import watch as run

    raise typer.Exit(run(job, router=router, as_json=as_json))


@app.command()
def cancel(
    job: Annotated[str, typer.Argument(help="Name of the job.")],
    router: RouterAddress = _ROUTER,
    as_json: Json = False,
) -> None:
    """Stop a job; its open groups are given up."""
    from muster.cli.jobs import cancel as run

    raise typer.Exit(run(job, router=router, as_json=as_json))


@app.command()
def demo(
    batches: Annotated[int, typer.Option(min=1, help="Batches to train.")] = 2,
    groups_per_batch: Annotated[int, typer.Option(min=1, help="Groups in a batch.")] = 4,
    group_size: Annotated[int, typer.Option(help="Siblings in a group.")] = 4,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 0.7,
    tasks: Annotated[
        Path | None, typer.Option(help="Task set; without it, the bundled one.")
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="Longest wait for the batches.")] = 1800.0,
    config: ConfigPath = None,
    as_json: Json = False,
) -> None:
    """Everything once: start, collect batches, train, publish, report, stop."""
    from muster.cli.demo import DemoOptions
    from muster.cli.demo import demo as run

    options = DemoOptions(batches, groups_per_batch, group_size, temperature, timeout_s)
    raise typer.Exit(run(options, tasks=tasks, config_path=config, as_json=as_json))


@tasks_app.command("check")
def tasks_check(
    path: Annotated[Path, typer.Argument(help="A task folder, or a folder of task folders.")],
    config: ConfigPath = None,
    as_json: Json = False,
) -> None:
    """Run each task three times in boxes: nothing → 0, solution/wrong.sh → 0, solve.sh → 1."""
    from muster.cli.check import check as run

    raise typer.Exit(run(path, config_path=config, as_json=as_json))


# `report`, `audit` and `journal verify`: what only looks at a run stands apart.
app.registered_commands += inspect_app.registered_commands
app.registered_groups += inspect_app.registered_groups


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script; always leaves by SystemExit."""
    try:
        app(args=arguments)
    except MusterError as error:
        sys.exit(_refused(error))
    except BaseExceptionGroup as group:
        wanted, bugs = group.split(MusterError)
        if bugs is not None or wanted is None:
            raise
        sys.exit(max(_refused(leaf) for leaf in _leaves(wanted)))
    except KeyboardInterrupt:
        sys.exit(130)


def _refused(error: BaseException) -> int:
    print(error, file=sys.stderr)
    return 2


def _leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in _leaves(inner)]


if __name__ == "__main__":
    main()
