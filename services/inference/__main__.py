"""`python -m services.inference --config FILE`: one engine replica.

Heavy imports happen inside functions: `--help` is quick, and the namespaces of muster/isolate.py
must be entered before anything starts a thread.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import traceback
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from muster import isolate, lifecycle, telemetry
from muster.clock import monotonic
from muster.config import Config, load_config
from muster.errors import ConfigError, MusterError, Unavailable
from muster.tasks import end
from services.inference.config import InferenceConfig

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from muster.fingerprint import ServingFingerprint
    from services.inference.driver import ReplicaDriver
    from services.inference.engine import Engine

T = TypeVar("T")
MakeEngine = Callable[[InferenceConfig, Path], "Engine"]
_ALIVE_POLL_S = 0.5
_REDIS_AWAY_S = 0.5
_FAKE_TOKENS_PER_GIB = 1 << 16
_log = telemetry.logger("muster.inference")


async def serve_replica(life: lifecycle.Lifecycle, make: MakeEngine, name: str = "") -> None:
    """Serve until asked to stop or the engine dies; `name`: the replica's id, "" for a new one."""
    from muster import rpc
    from muster.advertise import advertised
    from muster.registry import Registry
    from muster.streams import connect
    from muster.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server as add
    from services.inference.server import SERVICE, InferenceServicer

    config = life.config
    settings = config.section("inference", InferenceConfig)
    _check(settings)
    replica_id = name or f"inference-{uuid.uuid4().hex[:8]}"
    async with connect(config.redis) as redis:
        found = await _unless_stopped(life, _newest(redis, config))
        if found is None:
            return
        folder, version = found
        async with _driver(config, settings, folder, make(settings, folder)) as driver:
            servicer = InferenceServicer(replica_id, driver)
            async with rpc.serve(
                settings.listen, [(add, servicer)], field="inference.listen"
            ) as server:
                await server.set_serving(SERVICE, False)
                # Fakes that follow the records need no trainer to send them anything.
                asks = None if settings.follow_versions else partial(_published, redis, config.run)
                start = _start(driver, version, asks, settings.start_timeout_s)
                if not await _unless_stopped(life, start):
                    return
                recorded = _record(redis, config.run, driver.engine.fingerprint)
                if not await _unless_stopped(life, recorded):
                    return
                await server.set_serving(SERVICE, True)
                registry = Registry(redis, config.run)
                async with (
                    _following(redis, config.run, driver, settings),
                    registry.announce("inference", replica_id, advertised(server.address, config)),
                ):
                    try:
                        await _until_stopped(life, driver, settings.stall_s)
                    finally:
                        await server.set_serving(SERVICE, False)
                driver.replica.drain()


def _check(settings: InferenceConfig) -> None:
    """Raises ConfigError for settings that exclude each other."""
    if settings.follow_versions and settings.engine != "fake":
        raise ConfigError(
            "a real engine takes versions from the trainer alone",
            field="inference.follow_versions",
            value=True,
            way_out='take it out, or set inference.engine = "fake"',
        )


async def _newest(redis: Redis, config: Config) -> tuple[Path, int]:
    """The newest durable checkpoint that is there, and its version; else the base model and 0.

    A trainer that went back has set newer ones aside.
    """
    from muster.background import in_daemon
    from muster.model import ensure_model
    from muster.streams import RunStreams, version_record
    from muster.v1 import events_pb2 as ev

    messages = await RunStreams(redis, config.run).read_all("versions")
    records = [record for record in map(version_record, messages) if record]
    for record in sorted(records, key=lambda r: r.version, reverse=True):
        if record.stage != ev.VERSION_STAGE_DURABLE or not record.checkpoint:
            continue
        folder = config.state_dir / record.checkpoint  # an absolute path stays as it is
        if any(folder.glob("*.safetensors")):
            return folder, record.version
    cache = config.state_dir / "cache"
    base = await in_daemon(lambda: ensure_model(config.model.path, cache), "ensure-model")
    return base, 0


def make_engine(settings: InferenceConfig, folder: Path) -> Engine:
    """The engine that the configuration names, for the model in `folder`."""
    if settings.engine == "fake":
        from muster.transfer.receiving import Staging
        from services.inference.adapters.fake import FakeEngine, Script
        from services.inference.adapters.fake_words import words_of
        from services.inference.adapters.receive import receive_and_verify

        tokens = int(settings.kv_cache_gib * _FAKE_TOKENS_PER_GIB)
        script = Script(chunk=64, kv_tokens=tokens, block=settings.block_size)
        return FakeEngine(
            script,
            receive=partial(
                receive_and_verify, staging=Staging(), stored_root=settings.stored_root
            ),
            speak=words_of(folder),
        )
    from services.inference.adapters.vllm import VllmEngine

    return VllmEngine(str(folder), settings)


def _driver(
    config: Config, settings: InferenceConfig, folder: Path, engine: Engine
) -> ReplicaDriver:
    from services.inference.adapters.checkpoint import tensor_shapes
    from services.inference.driver import ReplicaDriver
    from services.inference.replica import Bounds, Replica

    bounds = Bounds(
        requests_max=settings.max_requests,
        scores_max=settings.scores_max,
        tokens_max=settings.max_model_len,
        credit_share=settings.credit_share,
        credit_ttl_s=settings.credit_ttl_s,
    )
    return ReplicaDriver(
        Replica(config.run, bounds, life=uuid.uuid4().hex),
        engine,
        receive_timeout_s=settings.receive_timeout_s,
        expected=tensor_shapes(folder),
    )


async def _unless_stopped(life: lifecycle.Lifecycle, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns; None when asked to stop before that, and it was cancelled."""
    async with asyncio.TaskGroup() as tasks:
        doing = tasks.create_task(work, name="starting")
        stop = tasks.create_task(life.stopping.wait(), name="stopping")
        await asyncio.wait((doing, stop), return_when=asyncio.FIRST_COMPLETED)
        done = doing.done()
        await end(doing, stop)
    return doing.result() if done else None


async def _published(redis: Redis, run: str) -> int | None:
    """The newest version that a replica of the run took; waits for a Redis that is away."""
    from muster.streams import latest_version
    from muster.v1 import events_pb2 as ev

    while True:
        try:
            record = await latest_version(redis, run, ev.VERSION_STAGE_PUBLISHED)
            return record.version if record else None
        except Unavailable as error:
            _log.warning("cannot ask for the published version: %s", error)
            await asyncio.sleep(_REDIS_AWAY_S)


async def _record(redis: Redis, run: str, serving: ServingFingerprint) -> bool:
    """Keep with the run what kind of engine serves it; waits for a Redis that is away."""
    from muster.served import record

    while True:
        try:
            await record(redis, run, serving)
            return True
        except Unavailable as error:
            _log.warning("cannot record what serves the run: %s", error)
            await asyncio.sleep(_REDIS_AWAY_S)


async def _start(
    driver: ReplicaDriver,
    version: int,
    published: Callable[[], Awaitable[int | None]] | None,
    timeout_s: float,
) -> bool:
    """True when the engine has started."""
    try:
        async with asyncio.timeout(timeout_s):
            await driver.start(version, published)
            return True
    except TimeoutError:
        raise Unavailable(
            f"the engine did not start within {timeout_s} s",
            field="inference.start_timeout_s",
            value=timeout_s,
            way_out="see its log, or allow more time",
        ) from None


@asynccontextmanager
async def _following(
    redis: Redis, run: str, driver: ReplicaDriver, settings: InferenceConfig
) -> AsyncIterator[None]:
    """A fake engine serves the versions that are recorded, where that is asked for."""
    from services.inference.adapters.fake import FakeEngine
    from services.inference.adapters.follow import catch_up, follow

    engine = driver.engine
    if not settings.follow_versions:
        yield
        return
    assert isinstance(engine, FakeEngine)  # others were refused before anything started

    def serve(version: int) -> None:
        engine.follow(version)
        driver.replica.followed(version)

    seen = await catch_up(redis, run, serve)
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(follow(redis, run, seen, serve), name="follow-versions")
        try:
            yield
        finally:
            await end(following)


async def _until_stopped(life: lifecycle.Lifecycle, driver: ReplicaDriver, stall_s: float) -> None:
    """Returns when asked to stop; raises when the engine died or gives nothing any more."""
    from services.inference.stall import Stall

    stall = Stall()
    while not life.stopping.is_set():
        if not driver.engine.alive():
            raise Unavailable("the engine died", way_out="restart this replica and see its log")
        silent_s = stall.silent_s(
            driver.engine.load(), updating=driver.replica.committing, now=monotonic()
        )
        if silent_s > stall_s:
            driver.replica.fence(f"no token for {silent_s:.1f} s")
            raise Unavailable(
                f"requests are running and no token has come for {silent_s:.1f} s",
                field="inference.stall_s",
                value=stall_s,
                way_out="the engine is wedged: restart this replica, or allow more time",
            )
        try:
            async with asyncio.timeout(min(_ALIVE_POLL_S, stall_s)):
                await life.stopping.wait()
        except TimeoutError:
            continue


def main(make: MakeEngine = make_engine) -> NoReturn:
    """Entry point; another `make` gives an engine of the caller's own."""
    parser = argparse.ArgumentParser(prog="services.inference", description="One engine replica.")
    parser.add_argument("--config", type=Path, help="TOML file; default: built-in settings")
    parser.add_argument(
        "--replica",
        default="",
        metavar="ID",
        help="its id in the run, one process at a time; default: a new one at each start",
    )
    arguments = parser.parse_args()
    path = arguments.config
    try:
        settings = load_config(path, os.environ).section("inference", InferenceConfig)
        if settings.isolate:
            isolate.enter()
    except MusterError:
        pass  # lifecycle.run meets it again and says it to the person
    try:
        status = lifecycle.run(
            partial(serve_replica, make=make, name=arguments.replica),
            name=arguments.replica or "inference",
            config_path=path,
        )
    except (SystemExit, KeyboardInterrupt):
        status = 0  # asked to stop before the loop had its handlers: nothing has begun
    except BaseException:  # noqa: BLE001 - said here, for the interpreter does not get to it
        traceback.print_exc()
        status = 1
    isolate.leave(status)


if __name__ == "__main__":
    main()
