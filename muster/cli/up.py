"""`muster up`, and running the services around a piece of work (the demo, the task check)."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from muster.cli.screen import Screen, emit, screen
from muster.cli.settings import read_config
from muster.config import Config
from muster.durability import PROMISES
from muster.errors import InvalidInput
from muster.supervise import plan
from muster.supervise.prepare import cache_dir, check_given, prepared
from muster.supervise.resolved import toml_of
from muster.supervise.state import router_address, runtime_dir
from muster.supervisor import Ended, Supervisor, Work

_ELSEWHERE = ("trainer", "inference", "sandbox")  # what others may stand for
_ADDRESS_S = 10.0  # until the supervisor has written down where the router that is ready listens


def up(
    config_path: Path | None,
    *,
    dry_run: bool,
    as_json: bool,
    standby: bool = False,
    without: Sequence[str] = (),
    allow_volatile: bool = False,
) -> int:
    """Run until a signal comes; 0 after a clean stop. `without`: services that are not started."""
    only = _all_but(without)
    config = read_config(config_path, standby=standby, allow_volatile=allow_volatile)
    if dry_run:
        check_given(config, only)
        return _show_plan(config, only, as_json)
    with screen(as_json) as shown:

        def work_of(resolved: Config) -> Work:
            async def hold() -> None:
                address = await _router_of(resolved)
                kept = "" if resolved.redis.appendfsync != "no" else f" ({PROMISES['no']})"
                for name in without:
                    shown.line(f"no {name} is started: the run waits for one of yours")
                shown.line(f"ready{kept}: submit with `muster submit PATH --router {address}`; "
                           "Ctrl-C stops")  # fmt: skip
                await asyncio.Event().wait()

            return hold

        ended = run_services(config, shown, work_of, only=only)
    return finish(ended, interrupted_status=0, as_json=as_json, kept=config.state_dir)


def _all_but(without: Sequence[str]) -> tuple[str, ...]:
    for name in without:
        if name not in _ELSEWHERE:
            raise InvalidInput(
                "no service that can run elsewhere",
                field="--without",
                value=name,
                way_out=f"name one of {', '.join(_ELSEWHERE)}",
            )
    return tuple(name for name in plan.FIVE if name not in without)


async def _router_of(config: Config) -> str:
    """Where the router really listens: the configured port may have been taken."""
    async with asyncio.timeout(_ADDRESS_S):
        while True:
            if address := router_address(config.state_dir):
                return address
            await asyncio.sleep(0.05)


def run_services(
    config: Config,
    shown: Screen,
    work_of: Callable[[Config], Work],
    *,
    only: Collection[str] = plan.FIVE,
) -> Ended:
    """Prepare, start, run the work that `work_of` makes for the resolved configuration, stop."""
    with prepared(config, shown.line, cache=cache_dir(), only=only) as ready:
        supervisor = Supervisor(ready.config, ready.claim, ready.services, show=shown.service)
        return asyncio.run(supervisor.run(work_of(ready.config)))


def finish(
    ended: Ended, *, interrupted_status: int, as_json: bool = False, kept: Path | None = None
) -> int:
    """The exit status; what went wrong goes to stderr as it was said, to programs as an object.

    kept: where the run stays, told after an end that was asked for.
    """
    if kept and not ended.line and not as_json:
        print(f"everything is stopped; the run is kept in {kept}")
    if ended.line:
        if as_json:
            emit("error", {"problem": ended.line})
        print(ended.line, file=sys.stderr)
        return ended.status
    return interrupted_status if ended.interrupted else ended.status


def _show_plan(config: Config, only: Collection[str], as_json: bool) -> int:
    services = plan.plan(config, runtime_dir(config.state_dir), only)
    if as_json:
        for service in services:
            emit("service", {"service": service.name, "command": list(service.command)})
        return 0
    print(toml_of(config))
    for service in services:
        print(f"# would start {service.name}: {' '.join(service.command)}")
    return 0
