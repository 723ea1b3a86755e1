"""`muster submit`, `muster watch` and `muster cancel`.

Promise: what can be seen to be wrong here is told before a router is looked for; a router is looked
for only where it was said to be. Does not cover: the calls (client.py), what is shown (screen.py).
"""

from __future__ import annotations

import asyncio
import difflib
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from muster.cli.screen import emit, fell_short, screen, summary
from muster.cli.settings import read_config
from muster.client import JobState, MusterClient, Progress
from muster.clock import monotonic
from muster.errors import InvalidInput, NotFound, Unavailable
from muster.supervise.state import read, router_address
from muster.types import JobPolicy, SamplingParams, Value
from muster.view import fitted

TRAINED_TOO = (
    "note: a submitted job is trained on, of eval tasks too: what it takes of them is held out no "
    "longer; `muster eval` runs them without training on them"
)
_STARTING_S = 60.0  # until a router that is being started says where it listens
_POLL_S = 0.2
_QUIET_S = 60.0  # a watch without a change says so once


class Where(Value, frozen=True):
    """Which router is meant: its address, or the `muster up` of these settings or this folder."""

    router: str = ""
    config: Path | None = None
    state_dir: Path | None = None

    @property
    def options(self) -> str:
        """What a command on the same run has to be given, to stand behind its name."""
        given = {"--config": self.config, "--state-dir": self.state_dir}
        return "".join(f" {name} {shlex.quote(str(p))}" for name, p in given.items() if p)


def submit(
    path: Path,
    *,
    groups: int,
    group_size: int,
    temperature: float,
    wait: bool,
    where: Where,
    as_json: bool,
    split: str = "train",
    instances: int | None = None,
    policy: Sequence[str] = (),
) -> int:
    """Submit; with `wait`, follow to the end. 0, or 1 when the job was cancelled."""

    async def send() -> str:
        async with reached(where) as client:
            return await client.submit(
                path,
                groups=groups,
                group_size=group_size,
                sampling=SamplingParams(temperature=temperature),
                split=split,
                instances=instances,
                policy=wanted,
            )

    wanted = job_policy(policy)
    job = asyncio.run(send())
    if split in ("eval", "all"):
        tell(TRAINED_TOO)
    if as_json:
        emit("submitted", {"job": job})
    elif wait:
        print(f"submitted {job}", flush=True)
    else:
        print(job)
    return watch(job, where=where, as_json=as_json) if wait else 0


def job_policy(settings: Sequence[str]) -> JobPolicy:
    """`key=value` settings as a policy; InvalidInput names what is wrong. Ranges: the router's."""
    raw: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        known = JobPolicy.__struct_fields__
        if not equals or key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
            way_out = f"write {near[0] if near else 'KEY'}=VALUE; known are {', '.join(known)}"
            raise InvalidInput("not a policy", field="--policy", value=setting, way_out=way_out)
        raw[key] = value
    try:
        return msgspec.convert(raw, JobPolicy, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidInput(
            f"not a value of that policy: {error}",
            field="--policy",
            value=", ".join(settings),
            way_out="repairs_max and valid_min are counts, infra_ceiling is a share from 0 to 1, "
            "zero_variance is train or filter",
        ) from None


def watch(job: str, *, where: Where, as_json: bool) -> int:
    """Follow to the end; 0 when the job is done, 1 when it was cancelled."""
    with screen(as_json) as shown:

        async def follow() -> Progress:
            async with reached(where) as client:
                why = f"`muster explain {job}{where.options}` says why"
                return await followed(
                    client.watch(job), shown.job, lambda line: tell(f"{line}: {why}")
                )

        last = asyncio.run(follow())
    if not as_json:
        print("\n".join(fitted([summary(last)])))
    if reason := fell_short(last):
        tell(f"{reason}; `muster report{where.options}` says why groups were filtered")
    return 0 if last.state is JobState.DONE else 1


async def followed(
    states: AsyncIterator[Progress],
    show: Callable[[Progress], None],
    tell: Callable[[str], None],
    *,
    quiet_s: float = _QUIET_S,
) -> Progress:
    """Show each state and return the last; `tell` hears of it when none has come for `quiet_s`.

    Once for each time of quiet, so that a job that hangs does not look like one that works.
    """
    last: Progress | None = None

    async def quietly() -> None:
        await asyncio.sleep(quiet_s)
        tell(f"nothing has changed for {quiet_s:g} s")

    async with asyncio.TaskGroup() as tasks:
        quiet = tasks.create_task(quietly(), name="watch-quiet")
        async for last in states:
            show(last)
            quiet.cancel()
            quiet = tasks.create_task(quietly(), name="watch-quiet")
        quiet.cancel()
    assert last is not None, "a watch ends with a state or raises"
    return last


def cancel(job: str, *, where: Where, as_json: bool) -> int:
    """Stop a job's episodes and give up its open groups; 0 when it is cancelled or was done."""

    async def send() -> Progress:
        async with reached(where) as client:
            return await client.cancel(job)

    last = asyncio.run(send())
    if as_json:
        emit("cancelled", {"job": job, "state": str(last.state)})
    else:
        print("\n".join(fitted([summary(last)])))
    return 0


@asynccontextmanager
async def reached(where: Where) -> AsyncIterator[MusterClient]:
    """A client of that router, wherever it listens by now.

    Without any word of where, the router of this machine's `muster up`, else the usual address.
    With a file or a folder only the router of that one: another one's runs another run. NotFound
    when nothing runs there, Unavailable when it takes too long to start.
    """
    if where.router:
        async with MusterClient(where.router, tell=tell) as client:
            yield client
        return
    state_dir = read_config(where.config, state_dir=where.state_dir).state_dir
    if where.config is not None or where.state_dir is not None:
        await _listens(state_dir)
    async with MusterClient(find=lambda: router_address(state_dir), tell=tell) as client:
        yield client


async def _listens(state_dir: Path) -> None:
    """Wait for the router of a `muster up` that is starting."""
    until = monotonic() + _STARTING_S
    told = False
    while not router_address(state_dir):
        if read(state_dir) is None:
            raise NotFound(
                "no `muster up` runs with this state folder",
                field="state_dir",
                value=state_dir,
                way_out="start it, or name a router with --router HOST:PORT",
            )
        if monotonic() >= until:
            raise Unavailable(
                f"its router is not ready after {_STARTING_S:.0f} s",
                field="state_dir",
                value=state_dir,
                way_out="see logs/router.log in that folder",
            )
        if not told:
            tell(f"waiting for the router of {state_dir} (at most {_STARTING_S:.0f} s)")
        told = True
        await asyncio.sleep(_POLL_S)


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
