"""Containers through the Docker API, of the same root file system as the boxes beside them.

Owns: the image (imported from a tarball, removed again), the times of create + start and of an
exec. Promise: raises `NoEngine` with the reason where there is no engine to ask; leaves no
container and no image. Does not cover: Muster's own docker backend (services/sandbox).
"""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiodocker
import aiohttp

from bench._bare import BASH
from muster.clock import monotonic

_CALL_S = 120.0
_READ = 1 << 20


class NoEngine(Exception):
    """Why nothing was measured."""


class Containers:
    """Of one image; each is removed after its batch."""

    def __init__(self, docker: aiodocker.Docker, image: str):
        self._docker, self._image = docker, image

    async def batch(self, times: defaultdict[str, list[float]]) -> None:
        """One container through its life: create and start, an exec, its removal."""
        config: dict[str, Any] = {
            "Image": self._image,
            "Cmd": ["/bin/sleep", "1000"],
            "HostConfig": {"NetworkMode": "none"},
        }
        async with asyncio.timeout(_CALL_S):
            began = monotonic()
            container = await self._docker.containers.create(config)
            try:
                await container.start()
                times["start"].append((monotonic() - began) * 1000)
                began = monotonic()
                run = await container.exec(["/bin/bash", "-c", BASH])
                async with run.start(detach=False) as stream:
                    while await stream.read_out() is not None:
                        pass
                if (await run.inspect())["ExitCode"] != 0:
                    raise SystemExit("the exec failed")
                times["step_bash"].append((monotonic() - began) * 1000)
                began = monotonic()
            finally:
                await container.delete(force=True)
            times["end"].append((monotonic() - began) * 1000)


@asynccontextmanager
async def containers(tarball: Path | None) -> AsyncIterator[Containers]:
    """Of that root file system. Raises NoEngine."""
    if tarball is None:
        raise NoEngine("no --rootfs TAR was given, which boxes and containers would share")
    try:
        docker = aiodocker.Docker()
    except ValueError as error:
        raise NoEngine(f"no Docker Engine: {error}") from error
    try:
        image = f"muster-bench-{secrets.token_hex(4)}"
        try:
            await docker.version()
        except (aiodocker.DockerError, aiohttp.ClientError, OSError) as error:
            raise NoEngine(f"no Docker Engine answers: {error}") from error
        await _import(docker, tarball, image)
        try:
            yield Containers(docker, image)
        finally:
            await docker.images.delete(image, force=True)
    finally:
        await docker.close()


async def _import(docker: aiodocker.Docker, tarball: Path, image: str) -> None:
    async def parts() -> AsyncIterator[bytes]:
        with tarball.open("rb") as file:
            while part := file.read(_READ):
                yield part

    made = docker._query(
        "images/create",
        method="POST",
        params={"fromSrc": "-", "repo": image, "tag": "latest"},
        data=parts(),
    )
    async with made as answer:
        said = await answer.text()
    if '"error"' in said:
        raise SystemExit(f"the image cannot be imported: {said}")
