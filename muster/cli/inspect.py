"""Commands that look at what was recorded: report, audit, journal verify.

They change nothing and work while a run goes on and after it has ended. Exit status: 0, 1 when
an audit or a journal shows a problem, 2 for an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muster.errors import InvalidInput, MusterError

# What a command needs is imported when it runs, so that `muster --help` answers at once.
if TYPE_CHECKING:
    from muster.figures import RunReport
    from muster.record import RunRecord

app = typer.Typer(no_args_is_help=True, add_completion=False)
journal_app = typer.Typer(no_args_is_help=True, help="Journals of decisions.")
app.add_typer(journal_app, name="journal")

RunOption = Annotated[str | None, typer.Option("--run", help="Run name; default: configuration.")]
StateOption = Annotated[Path | None, typer.Option("--state-dir", help="State folder of the run.")]
RedisOption = Annotated[str | None, typer.Option("--redis", help="Server address; skips looking.")]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="TOML file.")]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on standard output.")]
HtmlOption = Annotated[
    Path | None, typer.Option("--html", help="Write it as one page with the batches' timelines.")
]
BatchOption = Annotated[int | None, typer.Option("--batch", help="Only this batch.")]


@app.command()
def report(
    run: RunOption = None,
    state_dir: StateOption = None,
    batch: BatchOption = None,
    redis: RedisOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
    html: HtmlOption = None,
) -> None:
    """Time to each batch and where it went, outcomes, lag, mismatch, publications."""
    from muster import report as reports
    from muster.figures import report_json
    from muster.report_view import render
    from muster.view import console

    with telling():
        record = read(run, state_dir, redis, config)
        found = reports.report(record, batch)
        if html is not None:
            _write_page(html, record, found, batch)
        if json:
            typer.echo(report_json(found))
        elif html is None:
            console().print(render(found))


def _write_page(path: Path, record: RunRecord, found: RunReport, batch: int | None) -> None:
    import os

    from muster.clean import secret_values
    from muster.clock import wall
    from muster.page import page
    from muster.run_index import RunIndex
    from muster.timeline import timelines

    now = wall()
    drawn = timelines(RunIndex(record), now, batch)
    text = page(found, drawn, at_unix_s=now, secrets=secret_values(os.environ))
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise InvalidInput(
            f"cannot be written: {error.strerror}",
            field="--html",
            value=path,
            way_out="name a file in a folder that is there and may be written",
        ) from error
    shown = (
        f"{path} ({len(text.encode()) / 1024:.0f} KiB): open it in a browser; it needs no network"
    )
    typer.echo(shown, err=True)


@app.command()
def audit(
    run: RunOption = None,
    state_dir: StateOption = None,
    redis: RedisOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Does the record add up? Each trajectory once, each group one fate. Exit 1 on problems."""
    from muster import audit as audits
    from muster.audit_view import render_audit
    from muster.figures import as_json
    from muster.view import console

    with telling():
        found = audits.audit(read(run, state_dir, redis, config))
        if json:
            typer.echo(as_json(found))
        else:
            console().print(render_audit(found))
    if not found.ok:
        raise typer.Exit(1)


@journal_app.command()
def verify(
    paths: Annotated[list[Path], typer.Argument(metavar="FILE|DIR...")],
    json: JsonOption = False,
) -> None:
    """Replay journals through their machines; exit 1 when a decision differs."""
    from muster import journal as journals
    from muster.figures import as_json
    from muster.view import console, safe

    with telling():
        replays = [journals.verify(path) for path in _files(paths)]
    if json:
        typer.echo(as_json(replays))
    else:
        shell = console()
        for replay in replays:
            verdict = f"DIFFERS at {replay.problem}" if replay.problem else "equal"
            counts = f"{replay.events} events, {replay.commands} decisions"
            shell.print(safe(f"{replay.file}: {replay.machine}: {counts}: {verdict}", 2000))
        events = sum(replay.events for replay in replays)
        shell.print(f"{len(replays)} journals, {events} events (timer ticks not counted)")
    if any(replay.problem for replay in replays):
        raise typer.Exit(1)


def read(
    run: str | None, state_dir: Path | None, redis: str | None, config: Path | None
) -> RunRecord:
    """The record of a run, wherever its streams are."""
    from muster.attach import attached
    from muster.cli.settings import read_config
    from muster.record import read_record

    settings = read_config(config, state_dir=state_dir)
    name = run or settings.run

    async def read() -> RunRecord:
        async with attached(settings, redis) as client:
            return await read_record(client, name, settings.history(name))

    return asyncio.run(read())


def _files(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        found = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        if not found or not found[0].is_file():
            raise InvalidInput(
                "there is no journal", field="FILE", value=path, way_out="name a file or a folder"
            )
        yield from found


@contextmanager
def telling() -> Iterator[None]:
    """Errors for people: one line on standard error, exit 2."""
    try:
        yield
    except MusterError as error:
        from muster.view import safe

        typer.echo(f"muster: {safe(str(error), 2000).plain}", err=True)
        raise typer.Exit(2) from error
