"""`muster doctor`: what is wrong with a deployment, and the fix for each thing.

Promise: changes nothing; every part of it is bounded in time; a fault that hides others (no Redis)
is told first, and what could not be looked at because of it is told as that. Exit status: 0 no
problem, 1 problems. Does not cover: why a run waits (`muster explain`), whether its records add up
(`muster audit`).
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

# What the command needs is imported when it runs, so that `muster --help` answers at once.
if TYPE_CHECKING:
    from muster.config import Config
    from muster.doctor import Check
    from muster.doctor_fleet import Seen

app = typer.Typer(add_completion=False)


@app.command()
def doctor(
    role: Annotated[
        list[str] | None,
        typer.Option(
            "--role",
            metavar="ROLE",
            help="Check this machine for router, inference, sandbox, readybank or trainer (once "
            "for each), or none. Default: what it announces, or all without a redis.url.",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML file of the deployment.", metavar="FILE")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line, for programs.")
    ] = False,
) -> None:
    """Check a deployment: Redis, services, clocks, versions, this machine; a fix for each fault."""
    from muster import doctor as words
    from muster.cli.screen import emit
    from muster.view import fitted

    checks = list(_checks(config, role))
    if as_json:
        for check in checks:
            emit("check", {"name": check.name, "status": str(check.status), "what": check.what,
                           "way_out": check.way_out})  # fmt: skip
    else:
        print("\n".join(fitted(words.lines(checks))))
    raise typer.Exit(1 if words.problems(checks) else 0)


def _checks(path: Path | None, roles: Sequence[str] | None) -> Iterator[Check]:
    from muster.config import FILE, load_config
    from muster.doctor import ok, problem
    from muster.errors import ConfigError

    asked = _asked_roles(roles)
    try:
        config = load_config(path, os.environ)
    except ConfigError as error:
        where = f"{error.field} = {error.value!r}: {error.problem}"
        yield problem("configuration", where, error.way_out or "mend it")
        return
    read = str(path or os.environ.get(FILE) or "defaults")
    yield ok("configuration", f"{read} and MUSTER_* variables")
    yield from _given(config, asked)
    config = _with_running(config)
    seen: list[Seen] = []
    yield from _deployment(config, seen)
    here = _roles(config, seen, asked)
    yield from _machine(config, path, here, seen)


def _asked_roles(roles: Sequence[str] | None) -> tuple[str, ...] | None:
    from muster.doctor_fleet import ROLES
    from muster.errors import InvalidInput

    for role in roles or ():
        if role not in (*ROLES, "none"):
            raise InvalidInput(
                "no such role", field="--role", value=role, way_out=f"one of {', '.join(ROLES)}"
            )
    return None if roles is None else tuple(role for role in roles if role != "none")


def _given(config: Config, asked: tuple[str, ...] | None) -> Iterator[Check]:
    """What `muster up` would refuse before it starts anything."""
    from muster.doctor import problem
    from muster.errors import MusterError
    from muster.supervise.plan import FIVE
    from muster.supervise.prepare import check_given

    for role in FIVE if asked is None else asked:
        try:
            # The model is looked at apart: only where something is to read it.
            check_given(config, (role,) if role in ("sandbox", "readybank") else ())
        except MusterError as error:
            where = f"{error.field} = {error.value!r}: {error.problem}"
            yield problem("configuration", where, error.way_out or "mend it")
            return


def _with_running(config: Config) -> Config:
    """With the address of the server that a running `muster up` has started, where one has."""
    from muster.supervise.plan import redis_url
    from muster.supervise.state import runtime_dir

    url = redis_url(config, runtime_dir(config.state_dir))
    if config.redis.url or not os.path.exists(url.removeprefix("unix://")):
        return config
    return config.model_copy(update={"redis": config.redis.model_copy(update={"url": url})})


def _deployment(config: Config, seen: list[Seen]) -> Iterator[Check]:
    """The server and who is announced there; `seen` is filled."""
    from muster.doctor import problem, unseen
    from muster.doctor_fleet import fleet_checks
    from muster.doctor_look import look_at_fleet, look_at_redis
    from muster.doctor_redis import redis_checks
    from muster.errors import MusterError
    from muster.registry import release

    facts = asyncio.run(look_at_redis(config.redis))
    yield from redis_checks(facts, config.redis)
    if facts is None:
        yield unseen("fleet", "no service runs here that could be asked", "start it: muster up")
        return
    if facts.error:
        yield unseen("fleet", "services cannot be found without Redis", "mend redis.url first")
        return
    try:
        seen += asyncio.run(look_at_fleet(config))
    except MusterError as error:
        yield problem("fleet", error.problem, error.way_out or "see the lines on Redis")
        return
    yield from fleet_checks(seen, config, socket.gethostname(), release())


def _roles(config: Config, seen: Sequence[Seen], asked: tuple[str, ...] | None) -> tuple[str, ...]:
    from muster.doctor_fleet import ROLES

    if asked is not None:
        return asked
    here = {one.entry.kind for one in seen if one.entry.host == socket.gethostname()}
    if not here and not config.redis.url:
        return ROLES
    return tuple(role for role in ROLES if role in here)


def _machine(
    config: Config, path: Path | None, roles: tuple[str, ...], seen: Sequence[Seen]
) -> Iterator[Check]:
    from muster.doctor import note
    from muster.doctor_look import look_at_boxes, look_at_machine
    from muster.doctor_machine import box_checks, machine_checks

    if not roles:
        yield note(
            "machine", "nothing of this run is announced from here, so this machine is not checked",
            "name what is to run here: muster doctor --role sandbox",
        )  # fmt: skip
        return
    yield from machine_checks(look_at_machine(config, roles, seen), config)
    if "sandbox" in roles:
        yield from box_checks(look_at_boxes(path))
