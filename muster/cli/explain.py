"""`muster explain`: what a run, batch, group or episode waits for, and the command to run next.

The router, the bank and the trainer are asked; for one that does not answer the streams speak, and
that is said. Changes nothing. Exit status: 0, 2 for an error.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muster.cli.inspect import (
    ConfigOption,
    JsonOption,
    RedisOption,
    RunOption,
    StateOption,
    telling,
)

# What the command needs is imported when it runs, so that `muster --help` answers at once.
if TYPE_CHECKING:
    from muster.explained import Answer
    from muster.run_index import RunIndex
    from muster.subject import Subject

app = typer.Typer(add_completion=False)


@app.command()
def explain(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN | JOB | batch N | GROUP | EPISODE]", help="Default: the run."),
    ] = None,
    run: RunOption = None,
    state_dir: StateOption = None,
    redis: RedisOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """What it waits for, since when, who has to move, which command to run next."""
    from muster.clock import wall
    from muster.explained import explained, lines
    from muster.figures import as_json
    from muster.view import fitted

    with telling():
        index, asked, answers, logs = asyncio.run(_ask(what or [], run, state_dir, redis, config))
        options = _options(run, state_dir, redis, config)
        folder = _options(None, state_dir, None, config)
        now = wall()
        found = explained(index, asked, answers, now, options=options, folder=folder, logs=logs)
        typer.echo(as_json(found) if json else "\n".join(fitted(lines(found))))


async def _ask(
    words: Sequence[str],
    run: str | None,
    state_dir: Path | None,
    redis: str | None,
    config: Path | None,
) -> tuple[RunIndex, Subject, dict[str, Answer], str]:
    from muster.attach import attached
    from muster.cli.ask import ask
    from muster.cli.settings import read_config
    from muster.record import read_record
    from muster.run_index import RunIndex
    from muster.subject import Kind, subject

    settings = read_config(config, state_dir=state_dir)
    name = run or settings.run
    async with attached(settings, redis) as client:
        index = RunIndex(await read_record(client, name, settings.history(name)))
        asked = subject(words, index)
        group = asked.id.rsplit(".", 2)[0] if asked.kind in (Kind.GROUP, Kind.EPISODE) else ""
        answers = await ask(client, name, asked, group)
        return index, asked, answers, shlex.quote(str(settings.state_dir / "logs"))


def _options(
    run: str | None, state_dir: Path | None, redis: str | None, config: Path | None
) -> str:
    """What was given here and the next command needs too."""
    given = {"--run": run, "--state-dir": state_dir, "--redis": redis, "--config": config}
    return "".join(f" {name} {shlex.quote(str(v))}" for name, v in given.items() if v is not None)
