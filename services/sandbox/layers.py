"""Which snapshots there are, who uses them, and which may go. Pure.

Owns: the table of snapshots by name: what each stands on, how deep it is, which boxes use it, of
which set-up it is. Promise: a snapshot that a box or another snapshot stands on is never dropped;
one of a forked box goes as soon as nothing does; those of set-ups go, the one unused longest first,
when there are more, or larger ones, than the bounds allow. Does not cover: making and dropping them
(adapters/templates.py).
"""

from __future__ import annotations

from muster.types import Value
from services.sandbox.box import Snapshot


class LayerRules(Value, frozen=True):
    """Bounds: snapshots, their bytes, layers of one above its base."""

    snapshots_max: int = 64
    bytes_max: int = 2 << 30
    depth_max: int = 16


class Layer(Value, frozen=True):
    """A snapshot: of the set-up of `content`, or of a forked box (empty)."""

    name: str
    under: str
    told: Snapshot
    content: str = ""


class Layers:
    """See the module."""

    def __init__(self, rules: LayerRules):
        self._rules = rules
        self._layers: dict[str, Layer] = {}
        self._users: dict[str, str] = {}  # user → layer
        self._last: dict[str, float] = {}
        self._set_ups: dict[str, str] = {}  # content → layer

    def add(self, layer: Layer, now: float) -> None:
        """A snapshot was made; one of a content that had one already replaces it."""
        self._layers[layer.name] = layer
        self._last[layer.name] = now
        if layer.content:
            self._set_ups[layer.content] = layer.name

    def of_content(self, content: str) -> Layer | None:
        """The snapshot of a set-up."""
        name = self._set_ups.get(content)
        return None if name is None else self._layers[name]

    def get(self, name: str) -> Layer | None:
        return self._layers.get(name)

    def use(self, user: str, name: str, now: float) -> None:
        """A box, or the caller of one to come, stands on it from now on and on no other."""
        self._users[user] = name
        self._last[name] = now

    def leave(self, user: str, now: float) -> None:
        """It is gone; nothing for one that used none."""
        name = self._users.pop(user, None)
        if name is not None and name in self._last:
            self._last[name] = now

    def used_by(self, user: str) -> str:
        """The snapshot that a box stands on, or nothing."""
        return self._users.get(user, "")

    def forget(self, content: str) -> None:
        """No further box starts from the snapshot of this set-up."""
        self._set_ups.pop(content, None)

    def too_deep(self, name: str) -> bool:
        """Whether it has to be made one layer before a box starts from it."""
        return self._layers[name].told.depth > self._rules.depth_max

    def chain(self, name: str) -> tuple[Layer, ...]:
        """The snapshot and those below it, top first."""
        found: list[Layer] = []
        while name in self._layers:
            found.append(self._layers[name])
            name = self._layers[name].under
        return tuple(found)

    def collect(self) -> list[Layer]:
        """Those that go now, in the order in which they can be dropped; they are forgotten here."""
        gone: list[Layer] = []
        while (layer := self._next_to_go()) is not None:
            del self._layers[layer.name], self._last[layer.name]
            if self._set_ups.get(layer.content) == layer.name:
                del self._set_ups[layer.content]
            gone.append(layer)
        return gone

    @property
    def count(self) -> int:
        return len(self._layers)

    @property
    def size(self) -> int:
        """Bytes of all of them."""
        return sum(layer.told.size for layer in self._layers.values())

    def _next_to_go(self) -> Layer | None:
        needed = set(self._users.values()) | {layer.under for layer in self._layers.values()}
        unused = [layer for name, layer in self._layers.items() if name not in needed]
        for layer in unused:
            if self._set_ups.get(layer.content) != layer.name:
                return layer
        full = self.count > self._rules.snapshots_max or self.size > self._rules.bytes_max
        return min(unused, key=lambda one: self._last[one.name], default=None) if full else None
