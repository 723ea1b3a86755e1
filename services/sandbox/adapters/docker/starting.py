"""Starts containers, so many at once, and not at all for a while after trouble of the engine.

Promise: a start that fails, or whose caller leaves, leaves no container. Does not cover: when to
try again (boots.py), what a container may do (placing.py).
"""

from __future__ import annotations

import asyncio
from typing import Any

from muster import telemetry
from muster.clock import monotonic
from services.sandbox.adapters.docker.boots import BootRules, Boots
from services.sandbox.adapters.docker.engine import Engine, EngineTrouble
from services.sandbox.box import BoxFailure

_log = telemetry.logger("muster.sandbox")
_HOPELESS = (400, 404)  # what the engine says of a request that no repeat mends


class Starter:
    """Of one engine."""

    def __init__(self, engine: Engine, rules: BootRules):
        self._engine, self._boots = engine, Boots(rules)
        self._at_once = asyncio.Semaphore(rules.at_once)

    async def start(self, name: str, config: dict[str, Any]) -> str:
        """The id of a running container. Raises BoxFailure."""
        async with self._at_once:
            for left in reversed(range(self._boots.rules.tries)):
                await asyncio.sleep(self._boots.wait_s(monotonic()))
                try:
                    container = await self._engine.create(name, config)
                    await self._engine.start(container)
                except EngineTrouble as trouble:
                    await self.discard(name)
                    if not left or trouble.status in _HOPELESS:
                        raise
                    self._boots.failed(monotonic())
                except BaseException:
                    await self.discard(name)
                    raise
                else:
                    self._boots.succeeded()
                    return container
        raise BoxFailure("the engine started no container")

    async def discard(self, container: str) -> None:
        """Remove one on the way out of something else, which is what the caller hears of."""
        try:
            await self._engine.remove(container)
        except EngineTrouble as trouble:
            _log.error("container %s could not be removed: %s", container, trouble)
