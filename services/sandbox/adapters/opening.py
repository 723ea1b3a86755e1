"""Opens what the configuration names: the backend, the bases, and this host's name.

Promise: everything wrong with it is an error that names the field, before a box is made. Does not
cover: the backends themselves.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from muster.config import Config
from muster.errors import ConfigError
from services.sandbox import bases
from services.sandbox.bases import Bases
from services.sandbox.box import Backend
from services.sandbox.config import SandboxConfig


def runtime_dir(config: Config, section: SandboxConfig) -> Path:
    """Where this instance keeps what it must find again."""
    return section.runtime_dir or config.state_dir / "sandbox"


def host_id(config: Config, section: SandboxConfig) -> str:
    """The host's name in the registry: the same for each service of one runtime_dir, so that a
    router finds its boxes again."""
    if section.host_id:
        return section.host_id
    from services.sandbox.adapters.native import survivors

    folder = runtime_dir(config, section)
    try:
        return survivors.host_id(folder)
    except OSError as error:
        raise ConfigError(
            f"cannot keep the host's name there: {error}",
            field="sandbox.runtime_dir",
            value=folder,
            way_out="choose a folder that this user can write, or set sandbox.host_id",
        ) from error


@asynccontextmanager
async def open_backend(
    config: Config, section: SandboxConfig, *, stop_s: float
) -> AsyncIterator[tuple[Backend, Bases]]:
    """The backend, and what images stand for in it. stop_s: how long its end may take."""
    folder = runtime_dir(config, section)
    if section.backend == "fake":
        from services.sandbox.adapters.scripted import open_scripted

        async with open_scripted() as scripted:
            yield scripted, Bases({"*": bases.HOST})
        return
    if section.backend == "docker":
        from services.sandbox.adapters.docker.opening import open_docker

        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        async with open_docker(section, folder) as docker:
            yield docker, docker.bases
        return
    from services.sandbox.adapters.native import basestore
    from services.sandbox.adapters.native.backend import open_native
    from services.sandbox.adapters.native.client import Patience

    settings = bases.read(section.bases, bases.NATIVE)
    prepared = await basestore.prepare(settings, config.state_dir / "bases")
    # Every box ends with the keeper, which tidies up on its own when that takes longer.
    async with open_native(
        folder,
        patience=Patience(stop_s=stop_s),
        orphan_s=section.orphan_s,
        answers_kept=section.answers_kept,
        bases=prepared.folders,
    ) as native:
        yield native, Bases(prepared.names)
