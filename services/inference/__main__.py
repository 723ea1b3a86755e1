"""`python -m services.inference --config FILE`: one engine replica.

Heavy imports happen inside functions: `--help` is quick, and the namespaces of muster/isolate.py
must be entered before anything starts a thread.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from muster import isolate, lifecycle
from muster.config import Config, load_config
from muster.errors import MusterError, Unavailable
from services.inference.config import InferenceConfig

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from services.inference.driver import ReplicaDriver

_ALIVE_POLL_S = 0.5


async def serve_replica(life: lifecycle.Lifecycle) -> None:
    """Serve until asked to stop or the engine dies."""
    from muster import rpc
    from muster.registry import Registry
    from muster.streams import connect
    from muster.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server as add
    from services.inference.server import SERVICE, InferenceServicer

    config = life.config
    settings = config.section("inference", InferenceConfig)
    replica_id = f"inference-{uuid.uuid4().hex[:8]}"
    async with connect(config.redis) as redis:
        folder, version = await _newest(redis, config)
        async with _driver(config, settings, folder) as driver:
            servicer = InferenceServicer(replica_id, driver)
            async with rpc.serve(
                settings.listen, [(add, servicer)], field="inference.listen"
            ) as server:
                await server.set_serving(SERVICE, False)
                if not await _started(life, driver, version, settings.start_timeout_s):
                    return
                await server.set_serving(SERVICE, True)
                registry = Registry(redis, config.run)
                async with registry.announce("inference", replica_id, server.address):
                    await _until_stopped(life, driver)
                driver.replica.drain()


async def _newest(redis: Redis, config: Config) -> tuple[Path, int]:
    """The newest durable checkpoint and its version; before the first, the base model and 0."""
    from muster.model import ensure_model
    from muster.streams import latest_version
    from muster.v1 import events_pb2 as ev

    record = await latest_version(redis, config.run, ev.VERSION_STAGE_DURABLE)
    if record is not None and record.checkpoint:
        folder = config.state_dir / record.checkpoint  # an absolute path stays as it is
        if any(folder.glob("*.safetensors")):
            return folder, record.version
    base = await asyncio.to_thread(ensure_model, config.model.path, config.state_dir / "cache")
    return base, 0


def _driver(config: Config, settings: InferenceConfig, folder: Path) -> ReplicaDriver:
    from services.inference.adapters.checkpoint import tensor_shapes
    from services.inference.driver import ReplicaDriver
    from services.inference.engine import Engine
    from services.inference.replica import Bounds, Replica

    engine: Engine
    if settings.engine == "fake":
        from services.inference.adapters.fake import FakeEngine
        from services.inference.adapters.receive import receive_and_verify

        engine = FakeEngine(receive=receive_and_verify)
    else:
        from services.inference.adapters.vllm import VllmEngine

        engine = VllmEngine(str(folder), settings)
    bounds = Bounds(
        requests_max=settings.max_requests,
        scores_max=settings.scores_max,
        tokens_max=settings.max_model_len,
    )
    return ReplicaDriver(
        Replica(config.run, bounds),
        engine,
        receive_timeout_s=settings.receive_timeout_s,
        expected=tensor_shapes(folder),
    )


async def _started(
    life: lifecycle.Lifecycle, driver: ReplicaDriver, version: int, timeout_s: float
) -> bool:
    """True when the engine serves; False when asked to stop before that."""
    async with asyncio.TaskGroup() as tasks:
        start = tasks.create_task(_start(driver, version, timeout_s), name="start-engine")
        stop = tasks.create_task(life.stopping.wait(), name="stopping")
        await asyncio.wait((start, stop), return_when=asyncio.FIRST_COMPLETED)
        done = start.done()
        start.cancel()
        stop.cancel()
    return done


async def _start(driver: ReplicaDriver, version: int, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await driver.start(version)
    except TimeoutError:
        raise Unavailable(
            f"the engine did not start within {timeout_s} s",
            field="inference.start_timeout_s",
            value=timeout_s,
            way_out="see its log, or allow more time",
        ) from None


async def _until_stopped(life: lifecycle.Lifecycle, driver: ReplicaDriver) -> None:
    while not life.stopping.is_set():
        if not driver.engine.alive():
            raise Unavailable("the engine died", way_out="restart this replica and see its log")
        try:
            async with asyncio.timeout(_ALIVE_POLL_S):
                await life.stopping.wait()
        except TimeoutError:
            continue


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="services.inference", description="One engine replica.")
    parser.add_argument("--config", type=Path, help="TOML file; default: built-in settings")
    path = parser.parse_args().config
    try:
        settings = load_config(path, os.environ).section("inference", InferenceConfig)
        if settings.isolate:
            isolate.enter()
    except MusterError:
        pass  # lifecycle.run meets it again and says it to the person
    return lifecycle.run(serve_replica, name="inference", config_path=path)


if __name__ == "__main__":
    sys.exit(main())
