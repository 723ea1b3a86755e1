"""One learning run: an evaluation, the training, an evaluation; each on real services.

Owns: the phases, their folders, what is kept between two starts. Promise: stopped at any moment,
also by SIGKILL, a run goes on where it was: a phase that has ended is not repeated, one that was
cut goes on from what its services made durable. Nothing that judges is trained on: an evaluation
has services of its own, without a trainer. Does not cover: figures (_learn_figures.py).
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from bench import _learn_figures as figures
from bench import _learn_plan as plan
from bench._process_tree import cpu_s
from muster.cli.demo import bundled_tasks
from muster.cli.screen import LineScreen
from muster.cli.up import run_services
from muster.client import JobState, MusterClient, Progress
from muster.clock import monotonic
from muster.config import Config, load_config
from muster.entries import RunRecord
from muster.errors import Refused, Unavailable
from muster.record import read_record
from muster.registry import Registry
from muster.streams import connect, latest_version
from muster.supervise import plan as services
from muster.supervise.state import router_address
from muster.supervisor import Work
from muster.types import SamplingParams
from muster.v1 import events_pb2 as ev

STATE = "learn.json"
JOB = "train"
_METER_S = 5.0
_FAILPOINTS = "MUSTER_TEST_FAILPOINTS"
_WITHOUT_TRAINER = tuple(name for name in services.FIVE if name != "trainer")


class Stopped(Exception):
    """Someone asked for the end; the run goes on when it is started again."""


class Run:
    """See the module. `folder` belongs to this run alone; `settings` are MUSTER_* of all phases."""

    def __init__(
        self,
        arm: plan.Arm,
        seed: int,
        recipe: plan.Recipe,
        folder: Path,
        model: str,
        settings: Mapping[str, str] | None = None,
    ):
        self._arm, self._seed, self._recipe = arm, seed, recipe
        self._settings = settings or {}
        self._folder, self._model = folder.absolute(), model
        self._state: dict[str, Any] = self._read()
        self._at = monotonic(), 0.0  # wall and processor seconds that are accounted for

    def go(self) -> dict[str, Any]:
        """All phases that are left; what the run found. Raises Stopped and MusterError."""
        self._state["starts"] += 1
        self._at = monotonic(), cpu_s(os.getpid())
        if "before" not in self._state:
            self._keep("before", self._evaluated("before", self._model))
        if "training" not in self._state:
            self._keep("training", self._trained())
        if "after" not in self._state:
            self._keep("after", self._evaluated("after", self._state["training"]["checkpoint"]))
        return self._state

    # -- what is kept --------------------------------------------------------------------

    def _read(self) -> dict[str, Any]:
        """Of an earlier start; refused when that was of another run."""
        mine = {"arm": self._arm.name, "seed": self._seed, "recipe": figures.plain(self._recipe)}
        path = self._folder / STATE
        if not path.exists():
            return {**mine, "starts": 0, "phases": {}}
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
        if {key: found[key] for key in mine} != mine:
            raise Refused(
                "another run, or one with another recipe, lies there",
                field="--state-dir",
                value=self._folder,
                way_out="name another folder, or remove this one",
            )
        return found

    def _write(self) -> None:
        path = self._folder / STATE
        aside = path.with_suffix(".new")
        aside.write_text(json.dumps(self._state) + "\n", "utf-8")
        aside.replace(path)

    def _keep(self, phase: str, found: dict[str, Any]) -> None:
        self._state[phase] = found
        self._write()

    # -- phases --------------------------------------------------------------------------

    def _evaluated(self, phase: str, model: str) -> dict[str, Any]:
        found: dict[str, Any] = {}

        async def work(config: Config, redis: Redis, client: MusterClient) -> None:
            for temperature in plan.TEMPERATURES:
                job = f"{phase}-{round(100 * temperature)}"
                await self._collect(
                    client,
                    job,
                    groups=len(plan.TIER) * plan.SAMPLES // plan.EVAL_GROUP,
                    group_size=plan.EVAL_GROUP,
                    temperature=temperature,
                    split="all",
                    instances=plan.held_out_seed(self._seed),
                    until=lambda p: p.groups_complete >= p.groups_total,
                )
                record = await _record(config, redis)
                found[f"{temperature:g}"] = figures.evaluated(record, job)
                if phase == "after":
                    shown = await figures.evidence(record, job, redis, seed=self._seed)
                    found[f"{temperature:g}"]["evidence"] = shown

        self._with_services(phase, model, plan.evaluating(), work, only=_WITHOUT_TRAINER)
        return found

    def _trained(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        recipe = self._recipe

        async def work(config: Config, redis: Redis, client: MusterClient) -> None:
            ended = await self._collect(
                client,
                JOB,
                groups=recipe.steps * recipe.groups,
                group_size=recipe.group_size,
                temperature=recipe.temperature,
                split="train",
                instances=plan.training_seed(self._seed),
                until=lambda p: p.ended,
            )
            if ended.state is not JobState.DONE or ended.groups_trained < ended.groups_total:
                raise Refused(f"only {ended.groups_trained} of {ended.groups_total} were trained")
            newest = await latest_version(redis, config.run, ev.VERSION_STAGE_DURABLE)
            assert newest is not None
            found.update(figures.trained(await _record(config, redis)))
            found["checkpoint"] = newest.checkpoint

        settings = plan.training(recipe, self._arm)
        with _failing(self._arm.failing):
            self._with_services("train", self._model, settings, work, only=services.FIVE)
        return found

    async def _collect(
        self,
        client: MusterClient,
        job: str,
        *,
        groups: int,
        group_size: int,
        temperature: float,
        split: str,
        instances: int,
        until: Callable[[Progress], bool],
    ) -> Progress:
        """Submit (a job that is there already stays as it is) and follow; the last progress."""
        root = bundled_tasks()
        await client.submit(
            [root / name for name in plan.TIER],
            groups=groups,
            group_size=group_size,
            sampling=SamplingParams(temperature=temperature, seed=self._seed),
            job=job,
            split=split,
            instances=instances,
        )
        shown = LineScreen()
        async for progress in client.watch(job):
            shown.job(progress)
            if until(progress):
                return progress
        raise Unavailable("the watch ended before the job")

    def _with_services(
        self,
        phase: str,
        model: str,
        settings: dict[str, str],
        work: Callable[[Config, Redis, MusterClient], Awaitable[None]],
        *,
        only: tuple[str, ...],
    ) -> None:
        """Run `work` among services whose state lies in the phase's own folder."""
        common = plan.variables(self._recipe, str(self._folder / phase), model)
        config = load_config(None, {**common, **settings, **self._settings})
        shown = LineScreen()

        def work_of(resolved: Config) -> Work:
            async def whole() -> None:
                async with connect(resolved.redis) as redis, asyncio.TaskGroup() as group:
                    meter = group.create_task(self._meter(phase), name="meter")
                    try:
                        await _with_client(resolved, redis, work)
                    finally:
                        meter.cancel()

            return whole

        ended = run_services(config, shown, work_of, only=only)
        self._account(phase)
        if ended.line:
            raise Unavailable(ended.line, way_out=f"see the logs in {config.state_dir}")
        if ended.interrupted:
            raise Stopped

    async def _meter(self, phase: str) -> None:
        """Now and then: what is killed has been accounted for until shortly before."""
        while True:
            self._account(phase)
            await asyncio.sleep(_METER_S)

    def _account(self, phase: str) -> None:
        """Add what was spent since the last time to the phase."""
        wall, cpu = self._at
        self._at = monotonic(), cpu_s(os.getpid())
        spent = self._state["phases"].setdefault(phase, {"wall_s": 0.0, "cpu_s": 0.0})
        spent["wall_s"] += self._at[0] - wall
        spent["cpu_s"] += max(0.0, self._at[1] - cpu)
        self._write()


@contextmanager
def _failing(points: str) -> Iterator[None]:
    """Services that start within fail there (muster/failpoints.py); "" nowhere."""
    if points:
        os.environ[_FAILPOINTS] = points
    try:
        yield
    finally:
        os.environ.pop(_FAILPOINTS, None)


async def _with_client(
    config: Config,
    redis: Redis,
    work: Callable[[Config, Redis, MusterClient], Awaitable[None]],
) -> None:
    entries = await Registry(redis, config.run).list("router")
    if not entries:
        raise Unavailable("the router is no longer listed", way_out="see logs/router.log")
    find = lambda: router_address(config.state_dir)  # noqa: E731
    async with MusterClient(entries[-1].address, find=find) as client:
        await work(config, redis, client)


async def _record(config: Config, redis: Redis) -> RunRecord:
    return await read_record(redis, config.run, config.history(config.run))
