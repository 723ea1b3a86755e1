"""`muster hosts`: the sandbox hosts of a run, how full and fast they are; how much each may take;
with --replicas the inference replicas, and what their figures depend on.

Each announced host is asked itself, with a short deadline; one that does not answer says so in its
row. Promise: without --set-capacity nothing is changed; a change is answered by the host that made
it. Exit status: 0, 2 for an error. Does not cover: what a host does with its capacity.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
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
from muster.errors import InvalidInput, NotFound

# What the command needs is imported when it runs, so that `muster --help` answers at once.
if TYPE_CHECKING:
    from muster.hosts import HostSeen
    from muster.registry import Entry
    from muster.replicas import ReplicaSeen

app = typer.Typer(add_completion=False)
_BOXES_MAX = 4096
_CALLED = {"sandbox": "sandbox host", "inference": "inference replica"}


@app.command()
def hosts(
    set_capacity: Annotated[
        list[str] | None,
        typer.Option(
            "--set-capacity",
            metavar="HOST=N",
            help="Let this host hold N boxes from now on; more than that end by themselves only.",
        ),
    ] = None,
    set_warm: Annotated[
        list[str] | None,
        typer.Option(
            "--set-warm",
            metavar="HOST=N",
            help="Let this host keep up to N boxes ready unused; 0 for none.",
        ),
    ] = None,
    replicas: Annotated[
        bool,
        typer.Option(
            "--replicas",
            help="Inference replicas instead: version, load, engine, dtypes, backend.",
        ),
    ] = False,
    run: RunOption = None,
    state_dir: StateOption = None,
    redis: RedisOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Sandbox hosts: capacity, boxes by state, pool hits, times of start, step and verify, load."""
    from muster.figures import as_json
    from muster.hosts import table
    from muster.view import console

    with telling():
        if replicas:
            _show_replicas(run, state_dir, redis, config, json=json)
            return
        wanted = _wanted("--set-capacity", set_capacity, least=1)
        warm = _wanted("--set-warm", set_warm, least=0)
        seen = asyncio.run(_ask(wanted, warm, run, state_dir, redis, config))
        if json:
            typer.echo(as_json(seen))
        else:
            console().print(table(seen))


def _show_replicas(
    run: str | None,
    state_dir: Path | None,
    redis: str | None,
    config: Path | None,
    *,
    json: bool,
) -> None:
    from muster.figures import as_json
    from muster.replicas import ask, served_with, table
    from muster.view import console, safe

    async def asked() -> list[ReplicaSeen]:
        return await ask(await _listed("inference", run, state_dir, redis, config))

    seen = asyncio.run(asked())
    if json:
        typer.echo(as_json(seen))
    else:
        console().print(table(seen))
        for line in served_with(seen):
            console().print(safe(line))


def _wanted(option: str, given: Sequence[str] | None, *, least: int) -> dict[str, int]:
    """Numbers by host. A host's name may have a `=` in it, its number has none."""
    wanted = {}
    for text in given or ():
        host, _, number = text.rpartition("=")
        if not host or not number.isdecimal() or not least <= int(number) <= _BOXES_MAX:
            raise InvalidInput(
                "not a host and a number of boxes",
                field=option,
                value=text,
                way_out=f"write HOST=N, N from {least} to {_BOXES_MAX}; `muster hosts` names them",
            )
        wanted[host] = int(number)
    return wanted


async def _ask(
    wanted: Mapping[str, int],
    warm: Mapping[str, int],
    run: str | None,
    state_dir: Path | None,
    redis: str | None,
    config: Path | None,
) -> list[HostSeen]:
    from muster.hosts import ask, set_capacity

    entries = await _listed("sandbox", run, state_dir, redis, config)
    for host in sorted({*wanted, *warm}):
        await set_capacity(_named(entries, host), wanted.get(host), warm.get(host))
    return await ask(entries)


async def _listed(
    kind: str,
    run: str | None,
    state_dir: Path | None,
    redis: str | None,
    config: Path | None,
) -> list[Entry]:
    """The announced ones of that kind; at least one."""
    from muster.attach import attached
    from muster.cli.settings import read_config
    from muster.registry import Registry

    settings = read_config(config, state_dir=state_dir)
    name = run or settings.run
    async with attached(settings, redis) as client:
        entries = await Registry(client, name).list(kind)
    if not entries:
        raise NotFound(
            f"no {_CALLED[kind]} of this run is announced",
            field="run",
            value=name,
            way_out=f"start one (`muster up`, or `python -m services.{kind} --config FILE`), or "
            "name the run's server with --redis and its name with --run",
        )
    return entries


def _named(entries: Sequence[Entry], host: str) -> Entry:
    for entry in entries:
        if entry.id == host:
            return entry
    raise NotFound(
        "no sandbox host of this name is announced",
        field="HOST",
        value=host,
        way_out="use one of: " + ", ".join(entry.id for entry in entries),
    )
