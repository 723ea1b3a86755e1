"""Opening the docker backend: finding the engine, taking over or sweeping, and ending all.

Promise: HostUnfit with the way out when there is no engine, it lacks an image, or a container of
it cannot run a step; one service per runtime_dir at a time.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
from aiodocker import Docker

from muster import telemetry
from muster.errors import HostUnfit, InvalidInput
from muster.types import Limits
from services.sandbox.adapters.docker import layers, placing
from services.sandbox.adapters.docker.backend import DockerBackend
from services.sandbox.adapters.docker.boots import BootRules
from services.sandbox.adapters.docker.counters import Groups
from services.sandbox.adapters.docker.engine import Engine, EngineTrouble
from services.sandbox.adapters.docker.images import BUILT, Setup
from services.sandbox.adapters.docker.records import Record, Records
from services.sandbox.adapters.native import lock, survivors
from services.sandbox.adapters.native.cgroups import CgroupTrouble
from services.sandbox.bases import DOCKER, Bases, read
from services.sandbox.box import BoxFailure
from services.sandbox.config import SandboxConfig

_log = telemetry.logger("muster.sandbox")
_USUAL = "unix:///var/run/docker.sock"
_AT_ONCE = 8  # removals
_PROBE, _PROBE_S = "probe", 20.0
_WAY_OUT = (
    "start a Docker Engine and let this user reach its socket (group docker), name its address in "
    "sandbox.docker_url or DOCKER_HOST, or set sandbox.backend to native"
)


@asynccontextmanager
async def open_docker(config: SandboxConfig, runtime_dir: Path) -> AsyncIterator[DockerBackend]:
    """A backend whose boxes all end with the block, unless the process is killed."""
    try:
        handle = await asyncio.to_thread(lock.take, str(runtime_dir))
    except CgroupTrouble as trouble:
        raise HostUnfit(str(trouble), field="sandbox.runtime_dir", value=runtime_dir) from trouble
    try:
        async with _client(config.docker_url) as docker:
            engine = Engine(docker)
            backend = await _opened(engine, config, runtime_dir)
            try:
                yield backend
            finally:
                await _close(engine, backend)
    finally:
        os.close(handle)


@asynccontextmanager
async def _client(url: str) -> AsyncIterator[Docker]:
    url = url or os.environ.get("DOCKER_HOST") or _USUAL
    if not url.startswith("unix://"):
        async with Docker(url) as docker:
            yield docker
        return
    # As many connections as there are steps; the client's own bound is 100.
    async with aiohttp.UnixConnector(url.removeprefix("unix://"), limit=0) as connector:
        async with Docker("unix://localhost", connector=connector) as docker:
            yield docker


async def _opened(engine: Engine, config: SandboxConfig, runtime_dir: Path) -> DockerBackend:
    instance = await asyncio.to_thread(instance_of, runtime_dir)
    try:
        info = await engine.info()
        names = await _images(engine, config.bases)
    except EngineTrouble as trouble:
        raise HostUnfit(
            f"there is no Docker Engine to use: {trouble}", field="sandbox.backend", value="docker",
            way_out=_WAY_OUT,
        ) from trouble  # fmt: skip
    scratch = runtime_dir / "scratch"
    await asyncio.to_thread(scratch.mkdir, 0o700, exist_ok=True)
    bases = Bases(names)
    setup = Setup(
        instance, scratch, bases, _host_image(bases),
        Limits(memory_bytes=config.memory_bytes_max, cpus=config.cpus_max),
        boots=BootRules(at_once=config.starting_max),
    )  # fmt: skip
    records = Records(runtime_dir / "boxes", config.answers_kept)
    try:
        setup = await _probed(engine, records, setup, info)
        backend = DockerBackend(engine, records, setup)
        await _take_over(engine, records, backend)
    except BoxFailure as failure:
        raise HostUnfit(
            f"the Docker Engine cannot run boxes: {failure}", field="sandbox.backend",
            value="docker", way_out="see what it says; an image needs /bin/bash, env and coreutils",
        ) from failure  # fmt: skip
    return backend


def instance_of(runtime_dir: Path) -> str:
    """Names an instance in the engine's labels: by the host's name, which its folder keeps."""
    return hashlib.sha256(survivors.host_id(runtime_dir).encode()).hexdigest()[:12]


async def _images(engine: Engine, settings: Mapping[str, str]) -> dict[str, str]:
    """Pattern → id of the image that stands for it."""
    names = {}
    for pattern, setting in read(settings, DOCKER).items():
        image = await engine.image(setting.where)
        if image is None:
            raise HostUnfit(
                "the Docker Engine has no such image",
                field=f'sandbox.bases."{pattern}"',
                value=setting.where,
                way_out="pull, load, import or build it there; this service fetches none",
            )
        names[pattern] = str(image["Id"])
    return names


def _host_image(bases: Bases) -> str:
    """What stands for the image that tasks name when any will do; empty when none does."""
    try:
        return bases.base_for("muster/host-base")
    except InvalidInput:
        return ""


def _may_bound(info: dict[str, object]) -> bool:
    """Whether the storage driver may be able to bound a container's files; a start shows it."""
    status = info.get("DriverStatus")
    facts = dict(pair for pair in status if len(pair) == 2) if isinstance(status, list) else {}
    return info.get("Driver") in ("btrfs", "zfs") or facts.get("Backing Filesystem") == "xfs"


async def _probed(engine: Engine, records: Records, setup: Setup, info: dict[str, object]) -> Setup:
    """Run a step in a container once: whether it can, what can be bounded, what is told of it."""
    if not setup.host_image:
        return setup
    await engine.remove(f"muster-{setup.instance}-{_PROBE}")
    if _may_bound(info):
        try:
            return await _tried(engine, records, replace(setup, quota=True))
        except BoxFailure as failure:
            _log.info("files of boxes are not bounded by the storage driver: %s", failure)
    return await _tried(engine, records, setup)


async def _tried(engine: Engine, records: Records, setup: Setup) -> Setup:
    once = replace(setup, boots=BootRules(at_once=1, tries=1))
    trial = DockerBackend(engine, records, once)
    await trial.start(_PROBE, Limits())
    try:
        evidence = await trial.run(_PROBE, "true", _PROBE_S)
        if evidence.exit_code:
            raise BoxFailure(f"`true` ended with {evidence.exit_code}: {evidence.tail[-300:]!r}")
        shown, tell_stall = trial.counters(_PROBE)
    finally:
        await trial.end(_PROBE)
    if not shown:
        _log.warning(
            "the engine's control groups do not show below /sys/fs/cgroup here: limits that struck "
            "and processor time of steps cannot be told; mount them into this service (read-only)"
        )
    return replace(setup, tells_stall=tell_stall)


async def _take_over(engine: Engine, records: Records, backend: DockerBackend) -> None:
    """Adopt the boxes of a former service that can be used on; remove the rest of it."""
    label = f"{placing.INSTANCE}={backend.setup.instance}"
    known = await asyncio.to_thread(records.load)
    snapshots = {str(image["Id"]) for image in await engine.images(label) if not _is_built(image)}
    images: dict[str, set[str]] = {}
    swept = 0
    for container in await engine.containers(label):
        name = str(container["Id"])
        found = known.get(name)
        if found is not None and await _usable(engine, found.record, container):
            groups = await asyncio.to_thread(Groups, name)
            used = {str(container["ImageID"]), found.record.trusted}
            backend.adopt(found, groups, used & snapshots)
            images[name] = used
            continue
        await engine.remove(name)
        swept += 1
    for gone in known.keys() - images.keys():
        records.forget(gone)
    swept += await layers.sweep(engine, label, set().union(*images.values()))
    if swept or images:
        _log.info("%d boxes of a former service go on, %d leftovers removed", len(images), swept)


def _is_built(image: dict[str, Any]) -> bool:
    return any(f":{BUILT}" in tag for tag in image.get("RepoTags") or [])


async def _usable(engine: Engine, record: Record, container: dict[str, Any]) -> bool:
    """A step that ran when its service died is lost, and what it did is not known."""
    state = container["State"]
    if record.running is not None:
        return False
    if state == "paused" and not record.sealed:  # a copy of its files was under way
        try:
            await engine.unpause(str(container["Id"]))
        except EngineTrouble as trouble:
            _log.warning("container %s stays paused: %s", container["Id"], trouble)
            return False
        return True
    return bool((state == "running") != record.sealed)


async def _close(engine: Engine, backend: DockerBackend) -> None:
    """Remove all of this instance; what the engine does not do now, the next service sweeps."""
    label = f"{placing.INSTANCE}={backend.setup.instance}"
    gate = asyncio.Semaphore(_AT_ONCE)

    async def remove(container: str) -> None:
        async with gate:
            try:
                await engine.remove(container)
            except EngineTrouble as trouble:
                _log.error("container %s stays: %s", container, trouble)

    try:
        async with asyncio.TaskGroup() as tasks:
            for container in await engine.containers(label):
                tasks.create_task(remove(container["Id"]))
        await layers.sweep(engine, label, set())
    except EngineTrouble as trouble:
        _log.error("boxes may be left in the engine: %s", trouble)
    backend.forget_all()
