"""The backends that the contract is told on, and how one of them is opened for a test."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from services.sandbox.adapters.docker import opening, placing
from services.sandbox.adapters.docker.backend import DockerBackend
from services.sandbox.adapters.fake import FakeBackend, open_fake
from services.sandbox.adapters.native.backend import open_native
from services.sandbox.box import Backend
from tests.integration.docker_engine import open_boxes

NATIVE = pytest.param(
    "native",
    marks=[
        pytest.mark.root,
        pytest.mark.skipif(os.geteuid() != 0, reason="native boxes need root"),
    ],
)
ALL = ["fake", NATIVE, "docker"]


def opened(request: pytest.FixtureRequest, folder: Path) -> AbstractAsyncContextManager[Backend]:
    """The backend that the fixture's parameter names; skips where there is no Docker Engine."""
    if request.param == "docker":
        return open_boxes(request.getfixturevalue("docker_engine"), folder)
    return open_fake() if request.param == "fake" else open_native(folder)


KILLED = ["fake", "docker"]
"""Those whose service can be killed within a test; native boxes: test_sandbox_adopt."""
Opening = Callable[[], AbstractAsyncContextManager[Any]]


@asynccontextmanager
async def killed(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Opening]:
    """Opens the backend as services do that follow each other, each of which ends as if killed."""
    if request.param == "fake":
        async with open_fake() as made:
            yield lambda: nullcontext(made)
        return
    engine = request.getfixturevalue("docker_engine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "_close", _nothing)  # what a killed service does not come to
        yield lambda: open_boxes(engine, folder)
    async with open_boxes(engine, folder):
        pass


async def _nothing(*_: object) -> None:
    pass


async def there(backend: Backend) -> list[str]:
    """Names of all boxes, as the engine has them where there is one."""
    if isinstance(backend, DockerBackend):
        instance = backend.setup.instance
        found = await backend.engine.containers(f"{placing.INSTANCE}={instance}")
        return sorted(one["Labels"][placing.BOX] for one in found)
    assert isinstance(backend, FakeBackend)
    return backend.running


async def images(backend: Backend) -> int:
    """How many snapshots and built images there are."""
    if isinstance(backend, DockerBackend):
        return len(await backend.engine.images(f"{placing.INSTANCE}={backend.setup.instance}"))
    assert isinstance(backend, FakeBackend)
    return len(backend.layers)
