"""The images that boxes start from: those of the configuration, and those built of tasks.

Owns: the names in the engine of what was built. Promise: what an image says of itself (folder,
variables, user) is asked of the engine, whatever was built into it. Does not cover: snapshots
(layers.py), building itself (building.py), which images are needed still (the service).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.archive import TaskFile
from muster.types import Limits
from services.sandbox.adapters.docker import building, sessions
from services.sandbox.adapters.docker.boots import BootRules
from services.sandbox.adapters.docker.engine import Engine, Labels
from services.sandbox.adapters.docker.layers import Origin
from services.sandbox.adapters.docker.shell import Session
from services.sandbox.bases import HOST as HOST_BASE
from services.sandbox.bases import Bases
from services.sandbox.box import BoxFailure, Source

REPO, BUILT = "muster", "built-"  # what names and tags of ours begin with
_SESSIONS_KEPT = 256


@dataclass(frozen=True)
class Setup:
    """What one instance works with. host_image: what the base `host` is; empty when nothing is.

    life_s: a container ends by itself after that, if nobody is left to end it.
    """

    instance: str
    scratch: Path
    bases: Bases
    host_image: str
    build_limits: Limits
    boots: BootRules
    life_s: int = 86400
    quota: bool = False
    tells_stall: bool = False


class Images:
    """Of one instance of the service."""

    def __init__(self, engine: Engine, setup: Setup, labels: Labels):
        self._engine, self._setup, self._labels = engine, setup, labels
        self._sessions: dict[str, Session] = {}  # id → what it says; an id never changes

    async def build(self, content: str, context: dict[str, TaskFile], timeout_s: float) -> Source:
        """The image of a Dockerfile; `content` names what it is built of, for `drop`."""
        image = await building.build(
            self._engine, self._name(content), context, self._resolve, self._labels,
            self._setup.build_limits, timeout_s,
        )  # fmt: skip
        return Source(base=image)

    async def drop(self, content: str) -> bool:
        """Remove what was built, by this service or by a former one; False when there is none."""
        return await self._engine.remove_image(self._name(content))

    def _name(self, content: str) -> str:
        tag = hashlib.sha256(content.encode()).hexdigest()[:40]
        return f"{REPO}-{self._setup.instance}:{BUILT}{tag}"

    def _resolve(self, image: str) -> str:
        base = self._setup.bases.base_for(image)
        return self._setup.host_image if base == HOST_BASE else base

    async def origin(self, base: str) -> Origin:
        """For a box from a bare image."""
        name = self._setup.host_image if base == HOST_BASE else base
        if not name:
            raise BoxFailure(
                "no image stands for the base `host`: set sandbox.bases "
                '"muster/host-base" to image:NAME'
            )
        found = await self._found(name)
        image = str(found["Id"])
        user = str((found.get("Config") or {}).get("User") or "")
        return Origin(image, "", image, user, await self.session(image))

    async def session(self, image: str) -> Session:
        """What an image (id) says of the sessions in its boxes."""
        if image not in self._sessions:
            if len(self._sessions) >= _SESSIONS_KEPT:
                self._sessions.clear()
            self._sessions[image] = sessions.of_image(await self._found(image))
        return self._sessions[image]

    async def _found(self, name: str) -> dict[str, Any]:
        found = await self._engine.image(name)
        if found is None:
            raise BoxFailure(f"the engine has no image {name} any more")
        return found
