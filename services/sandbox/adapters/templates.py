"""Makes the snapshots that boxes start from, and removes those of no more use.

Owns: the table of snapshots and built images (layers.py), and every call that makes, squashes or
drops one. Promise: a set-up runs once for its content; a snapshot is pinned from the moment that a
start from it is decided until the box is gone; few boxes are copied at once (`copying_max`), and
none when what is in use fills the bounds. Does not cover: which box starts when (pool.py).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from muster import failpoints, telemetry
from muster.clock import monotonic
from muster.types import Limits
from services.sandbox import checks, environment
from services.sandbox.box import Backend, BoxFailure, Snapshot, Source
from services.sandbox.config import SandboxConfig
from services.sandbox.content import Setup
from services.sandbox.counts import Counts
from services.sandbox.layers import Layer, LayerRules, Layers

_log = telemetry.logger("muster.sandbox")
_SETUPS_KEPT = 64
_DOUBTS_MAX = 3  # starts from one snapshot that failed in a row, until it is made anew


class Templates:
    """`prefix` makes names of snapshots unique across restarts of the host."""

    def __init__(self, backend: Backend, config: SandboxConfig, counts: Counts, prefix: str):
        self._backend, self._config, self._counts = backend, config, counts
        self._prefix = prefix
        rules = LayerRules(config.snapshots_max, config.snapshot_bytes_max, config.squash_depth)
        self.layers = Layers(rules)
        self._slots = asyncio.Semaphore(config.copying_max)
        self._copying = 0  # boxes whose copy is made
        self._setups: OrderedDict[str, Setup] = OrderedDict()
        self._doubts: dict[str, int] = {}  # content → failed starts in a row
        self._count = 0

    def remember(self, setup: Setup) -> None:
        """For warm boxes, which start when no caller is there to tell it."""
        self._setups[setup.content] = setup
        self._setups.move_to_end(setup.content)
        while len(self._setups) > _SETUPS_KEPT:
            self._setups.popitem(last=False)

    def remembered(self, content: str) -> Setup | None:
        return self._setups.get(content)

    def has(self, content: str) -> bool:
        return self.layers.of_content(content) is not None

    def pin(self, user: str, setup: Setup) -> Source | None:
        """What a fresh box of this set-up starts from, kept until `leave`; None: it is gone."""
        layer = self.layers.of_content(setup.content)
        if layer is None:
            return None if setup.snapshot else Source(setup.base)
        self.layers.use(user, layer.name, monotonic())
        return Source(layer.image) if layer.image else Source(setup.base, layer.name)

    async def make(self, name: str, setup: Setup, limits: Limits) -> None:
        """Run a set-up in a box of that name and keep what it left; the box is gone then.

        Raises BoxFailure, or MusterError for what the task's author got wrong.
        """
        if setup.context:
            timeout_s = self._config.setup_timeout_s
            built = await self._backend.build(setup.content, setup.context, timeout_s)
            image = Layer(setup.content, "", Snapshot(depth=0), setup.content, image=built.base)
            self.layers.add(image, monotonic())
            self._doubts.pop(setup.content, None)
            return
        await self._backend.start(name, limits, Source(setup.base))
        await self.prepare(name, setup)
        layer = self._name()
        told = await self._snapshot(name, layer, keep=False)
        self.layers.add(Layer(layer, "", told, setup.content), monotonic())
        self._doubts.pop(setup.content, None)

    async def prepare(self, name: str, setup: Setup) -> None:
        """Do all actions of a set-up in a box."""
        for action in setup.actions:
            match action:
                case environment.Put(files):
                    await self._backend.put(name, files)
                case environment.Enter(cwd, env):
                    await self._backend.set_session(name, cwd, env)
                case environment.RunSetup(command, shown):
                    timeout_s = self._config.setup_timeout_s
                    found = await self._backend.run(name, command, timeout_s)
                    said = (found.head + found.tail).decode("utf-8", "replace")
                    checks.setup(shown, found, telemetry.printable(said))

    async def fork(self, name: str, user: str) -> Layer:
        """Snapshot a box that goes on, and pin it for `user`.

        Raises BoxFailure, or Exhausted when there is no room for it.
        """
        under = self.layers.used_by(name)
        if under:  # it stays, should the box end meanwhile
            self.layers.use(user, under, monotonic())
        async with self._slots:
            self._copying += 1
            try:
                self.layers.check_room(self._copying)
                found = await self._forked(name, under, user)
            finally:
                self._copying -= 1
        self.layers.check_room(0)  # what it holds is known only now
        return found

    async def _forked(self, name: str, under: str, user: str) -> Layer:
        layer = self._name()
        told = await self._snapshot(name, layer, keep=True)
        found = Layer(layer, under, told)
        self.layers.add(found, monotonic())
        self.layers.use(user, layer, monotonic())
        if not self.layers.too_deep(layer):
            return found
        flat = self._name()
        try:
            told = await self._backend.squash(layer, flat)
        except BoxFailure:
            self._counts.failures["squash"] += 1
            raise
        # The session is that of the box, whichever way its files are kept.
        session = Snapshot(told.size, told.depth, found.told.cwd, found.told.env)
        found = Layer(flat, "", session, needs=self.layers.set_ups_below(layer))
        self.layers.add(found, monotonic())
        self.layers.use(user, flat, monotonic())
        return found

    def doubt(self, setup: Setup, *, failed: bool) -> bool:
        """A start from the snapshot of a set-up succeeded or failed; True when it is given up."""
        if not failed:
            self._doubts.pop(setup.content, None)
            return False
        doubts = self._doubts[setup.content] = self._doubts.get(setup.content, 0) + 1
        if doubts < _DOUBTS_MAX:
            return False
        del self._doubts[setup.content]
        self.layers.forget(setup.content)
        return True

    async def drop(self, layers: list[Layer]) -> None:
        """Remove snapshots, the first first; what cannot be removed is logged and counted."""
        for layer in layers:
            await self._drop(layer.name)

    async def _drop(self, name: str) -> None:
        try:
            await self._backend.drop(name)
        except Exception as failure:  # noqa: BLE001 - one snapshot must not end the host
            self._counts.failures["drop"] += 1
            _log.error("snapshot %s could not be dropped: %r", name, failure)

    def _name(self) -> str:
        self._count += 1
        return f"L-{self._prefix}-{self._count}"

    async def _snapshot(self, name: str, layer: str, *, keep: bool) -> Snapshot:
        await failpoints.at("sandbox.snapshot.before")
        try:
            told = await self._backend.snapshot(name, layer, keep=keep)
            await failpoints.at("sandbox.snapshot.after")
        except Exception:
            self._counts.failures["snapshot"] += 1
            await self._drop(layer)  # it may have been made all the same
            raise
        return told
