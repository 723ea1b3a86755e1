"""Snapshots as images of the engine.

Owns: which there are, what lies below each, and their names in the engine. Promise: one that a box
or another one uses is not removed; a squashed one depends on nothing. What a snapshot costs: the
engine copies the box's own files whether the box goes on or not; squashing writes the whole file
system anew, base included. Does not cover: the boxes (backend.py).
"""

from __future__ import annotations

import hashlib
import re

from muster.types import Value
from services.sandbox.adapters.docker import transfer
from services.sandbox.adapters.docker.engine import Engine, EngineTrouble, Labels
from services.sandbox.adapters.docker.records import Record
from services.sandbox.adapters.docker.shell import Session
from services.sandbox.adapters.docker.transfer import Carried
from services.sandbox.box import BoxFailure, Snapshot

_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}\Z")


class Layer(Value, frozen=True):
    """A snapshot.

    image, tag: its id and its name in the engine. below: the snapshot that it lies on, empty on a
    base. trusted: the image of the newest state that no agent had a part in; carried: what differs
    from that. setup: the snapshot that has this state, empty for a base.
    """

    image: str
    tag: str
    below: str
    trusted: str
    setup: str
    user: str
    told: Snapshot
    carried: Carried = Carried()


class Origin(Value, frozen=True):
    """What a box is started from."""

    image: str
    layer: str
    trusted: str
    user: str
    session: Session
    carried: Carried = Carried()


class Layers:
    """Of one instance of the service."""

    def __init__(self, engine: Engine, instance: str, labels: Labels):
        self._engine, self._labels = engine, labels
        self._repo = f"muster-{instance}"
        self._layers: dict[str, Layer] = {}

    def has(self, name: str) -> bool:
        return name in self._layers

    def get(self, name: str) -> Layer:
        if name not in self._layers:
            raise BoxFailure(f"there is no snapshot {name}")
        return self._layers[name]

    def origin(self, name: str) -> Origin:
        """For a box from that snapshot."""
        layer = self.get(name)
        session = Session(layer.told.cwd, layer.told.env)
        return Origin(layer.image, name, layer.trusted, layer.user, session, layer.carried)

    def check_free(self, name: str) -> None:
        """Raises BoxFailure for a name that is taken."""
        if name in self._layers:
            raise BoxFailure(f"there is a snapshot {name} already")

    async def commit(self, name: str, record: Record, *, keep: bool) -> Snapshot:
        """The files of a box under a new name.

        Those of a box that goes on may be an agent's: only what a box leaves that ends in a
        snapshot, over nothing of an agent's, is a set-up that verifiers trust.
        """
        self.check_free(name)
        tag, container, below = self._tag(name), record.container, self._layers.get(record.layer)
        size = (await self._engine.inspect(container, size=True)).get("SizeRw") or 0
        trusted = not keep and not record.carried.there and not record.carried.gone
        trusted = trusted and (below is None or below.setup == record.layer)
        changes = [] if trusted else await self._engine.changes(container)
        image = await self._engine.commit(container, tag, self._labels, pause=keep)
        depth = below.told.depth + 1 if below else 1
        told = Snapshot(int(size), depth, record.cwd, dict(record.env))
        if trusted:
            self._layers[name] = Layer(image, tag, record.layer, image, name, record.user, told)
            return told
        self._layers[name] = Layer(
            image, tag, record.layer, record.trusted, below.setup if below else "", record.user,
            told, transfer.merged(record.carried, changes),
        )  # fmt: skip
        return told

    async def squash(self, name: str, into: str, container: str) -> Snapshot:
        """The files of `container`, made from `name`, as one image that depends on none."""
        layer, tag = self.get(name), self._tag(into)
        self.check_free(into)
        await self._engine.flatten(container, tag, self._labels)
        found = await self._engine.image(tag)
        if found is None:
            raise BoxFailure(f"the engine does not have the image {tag} that it made")
        image, told = str(found["Id"]), Snapshot(
            int(found.get("Size") or 0), 1, layer.told.cwd, layer.told.env
        )  # fmt: skip
        own = layer.setup == name
        self._layers[into] = Layer(
            image, tag, "", image if own else layer.trusted, into if own else layer.setup,
            layer.user, told, layer.carried,
        )  # fmt: skip
        return told

    async def drop(self, name: str, used: set[str]) -> bool:
        """Remove one; `used`: those that boxes were started from. False when there is none."""
        if name not in self._layers:
            return False
        others = [(n, layer) for n, layer in self._layers.items() if n != name]
        on_top = [n for n, layer in others if name in (layer.below, layer.setup)]
        if name in used or on_top:
            by = "a box" if name in used else f"the snapshots {', '.join(sorted(on_top))}"
            raise BoxFailure(f"the snapshot {name} is in use by {by}")
        await self._engine.remove_image(self._layers[name].tag)
        del self._layers[name]
        return True

    def _tag(self, name: str) -> str:
        tag = name if _TAG.match(name) else hashlib.sha256(name.encode()).hexdigest()
        return f"{self._repo}:{tag}"


async def sweep(engine: Engine, label: str, kept: set[str]) -> int:
    """Remove the images with that label but `kept` (ids); how many went.

    Those that others lie on go after them.
    """
    gone = 0
    while True:
        before = gone
        for image in await engine.images(label):
            if image["Id"] not in kept:
                gone += await _removed(engine, image)
        if gone == before:
            return gone


async def _removed(engine: Engine, image: dict[str, object]) -> int:
    tags = image.get("RepoTags")
    names = [str(tag) for tag in tags] if isinstance(tags, list) else []
    try:
        return int(await engine.remove_image(names[0] if names else str(image["Id"])))
    except EngineTrouble:
        return 0  # in use: by a box, or by one that goes in the next round
