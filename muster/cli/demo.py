"""`muster demo`: the whole main job once, on this machine.

Starts the services with a state folder of its own, submits a task set, follows the job until each
of its groups is trained and the last policy version is published, prints the report, stops.
A further demo goes on with the run it finds there: new batches from the newest version.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from redis.asyncio import Redis

import muster
from muster.cli.screen import Screen, screen
from muster.cli.settings import read_config
from muster.cli.up import finish, run_services
from muster.client import JobState, MusterClient, Progress
from muster.config import Config
from muster.errors import NotFound, Refused, Unavailable
from muster.patience import patiently
from muster.record import read_record
from muster.registry import Registry
from muster.report import report
from muster.streams import RunStreams, connect, latest_version
from muster.supervise.state import router_address
from muster.supervisor import Work
from muster.types import SamplingParams, Value
from muster.v1 import events_pb2 as ev

R = TypeVar("R")

# Two batches' worth, each with three one-command tasks and one that takes several turns: those
# whose siblings differ most under the untrained model (docs/results/tasks.md).
DEMO_TASKS = (
    "copy-file",
    "make-directory",
    "touch-file",
    "tidy-log",
    "write-word",
    "remove-directory",
    "make-executable",
    "two-words",
)
_POLL_S = 0.5
_AWAY_S = 60.0  # how long Redis may be away before a read gives up
_PUBLISH_S = 180.0  # after the last group is trained, until its version is served


class DemoOptions(Value, frozen=True):
    """What the command line asked for."""

    batches: int
    groups_per_batch: int
    group_size: int
    temperature: float
    timeout_s: float
    replicas: int = 0  # 0: as configured


def demo(
    options: DemoOptions,
    *,
    tasks: Path | None,
    config_path: Path | None,
    as_json: bool,
    allow_volatile: bool = False,
) -> int:
    """0 when all was trained, published and stopped; 130 after Ctrl-C."""
    config = demo_config(read_config(config_path, allow_volatile=allow_volatile), options)
    task_set = [tasks] if tasks else [bundled_tasks() / name for name in DEMO_TASKS]
    with screen(as_json) as shown:

        def work_of(resolved: Config) -> Work:
            async def work() -> None:
                await _work(resolved, options, task_set, shown)

            return work

        ended = run_services(config, shown, work_of)
    return finish(ended, interrupted_status=130, as_json=as_json, kept=config.state_dir)


def demo_config(config: Config, options: DemoOptions) -> Config:
    """`config` with the demo's state folder and batch size, and a port that is free."""
    changes = {
        "state_dir": config.state_dir / "demo",
        "groups_per_batch": options.groups_per_batch,
        "replicas": options.replicas or config.replicas,
    }
    return with_free_port(config).model_copy(update=changes)


def with_free_port(config: Config) -> Config:
    """`config` with a port for the router that nobody listens on."""
    sections = dict(config.sections)
    router = sections.get("router")
    if router:
        # A number, not 0: a restarted router has to be found where its clients look for it.
        listen = f"127.0.0.1:{_free_port()}"
        sections["router"] = router.model_copy(update={"listen": listen})
    return config.model_copy(update={"sections": sections})


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def bundled_tasks() -> Path:
    """The task set of the source tree, from there or from the current folder."""
    places = [Path(muster.__file__).resolve().parents[1] / "tasks", Path("tasks").resolve()]
    for place in places:
        if place.is_dir():
            return place
    raise NotFound(
        "the bundled task set is not here",
        field="--tasks",
        value=places[0],
        way_out="run in a clone of the project, or name a task set with --tasks",
    )


async def _work(config: Config, options: DemoOptions, task_set: list[Path], shown: Screen) -> None:
    async with connect(config.redis) as redis:
        entries = await Registry(redis, config.run).list("router")
        if not entries:
            raise Unavailable("the router is no longer listed", way_out="see logs/router.log")
        address = entries[-1].address
        client = MusterClient(address, find=lambda: router_address(config.state_dir))
        try:
            async with asyncio.timeout(options.timeout_s), client:
                for line in await unfinished(redis, config.run, client):
                    shown.line(line)
                await _collect(client, options, task_set, shown)
        except TimeoutError:
            raise Unavailable(
                "the batches were not trained in that time",
                field="--timeout-s",
                value=options.timeout_s,
                way_out="see the logs in the state folder, or allow more time",
            ) from None
        version = await _published(redis, config.run)
        shown.line(f"version {version} is published: every replica serves it")
        await _report(redis, config, shown)


async def _collect(
    client: MusterClient, options: DemoOptions, task_set: list[Path], shown: Screen
) -> None:
    job = await client.submit(
        task_set,
        groups=options.batches * options.groups_per_batch,
        group_size=options.group_size,
        sampling=SamplingParams(temperature=options.temperature),
    )
    shown.line(f"submitted {job}")
    last: Progress | None = None
    async for last in client.watch(job):
        shown.job(last)
    assert last is not None
    if last.state is not JobState.DONE or last.groups_trained < last.groups_total:
        raise Refused(
            f"only {last.groups_trained} of {last.groups_total} groups were trained "
            f"({last.groups_filtered} filtered)",
            field="job",
            value=job,
            way_out="`muster report` says why groups were filtered",
        )


async def unfinished(redis: Redis, run: str, client: MusterClient) -> list[str]:
    """A line for each job that an interrupted demo left: the router finishes those first."""
    lines: list[str] = []
    messages = await _patiently(lambda: RunStreams(redis, run).read_all("jobs"))
    jobs = dict.fromkeys(ev.JobRecord.FromString(message.data).job for message in messages)
    for job in jobs:
        left = await _patiently(partial(client.get, job))
        if not left.ended:
            lines.append(
                f"first {job} of an earlier demo is finished: {left.groups_trained} of "
                f"{left.groups_total} groups trained so far"
            )
    return lines


async def _published(redis: Redis, run: str) -> int:
    """Wait until the newest durable version is published; its number."""
    try:
        async with asyncio.timeout(_PUBLISH_S):
            while True:
                durable, served = await _patiently(lambda: _newest(redis, run))
                if durable and served and served.version >= durable.version:
                    return served.version
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise Unavailable(
            f"the newest version was not published within {_PUBLISH_S:.0f} s",
            way_out="see logs/trainer.log and logs/inference*.log in the state folder",
        ) from None


async def _newest(
    redis: Redis, run: str
) -> tuple[ev.PolicyVersionRecord | None, ev.PolicyVersionRecord | None]:
    """The newest version that is durable, and the newest that is published."""
    durable = await latest_version(redis, run, ev.VERSION_STAGE_DURABLE)
    return durable, await latest_version(redis, run, ev.VERSION_STAGE_PUBLISHED)


async def _report(redis: Redis, config: Config, shown: Screen) -> None:
    history = config.history(config.run)
    shown.report(report(await _patiently(lambda: read_record(redis, config.run, history))))


async def _patiently(read: Callable[[], Awaitable[R]]) -> R:
    """Repeat a read while Redis is away: it is restarted like any other service."""
    return await patiently("Redis", read, patience_s=_AWAY_S, most_s=_POLL_S)
