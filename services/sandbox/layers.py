"""Which snapshots there are, who uses them, and which may go. Pure.

Owns: the table of snapshots by name: what each stands on and needs, how deep it is, which boxes use
it, of which set-up it is; built images are snapshots of set-ups. Promise: a snapshot that a box or
another snapshot stands on, or needs, is never dropped; one of a forked box goes as soon as nothing
does; those of set-ups go, the one unused longest first, when there are more, or larger ones, than
the bounds allow; no box is forked when those in use alone would be more. Does not cover: making and
dropping them (adapters/templates.py).
"""

from __future__ import annotations

from muster.errors import Exhausted
from muster.types import Value
from services.sandbox.box import Snapshot


class LayerRules(Value, frozen=True):
    """Bounds: snapshots, their bytes, layers of one above its base."""

    snapshots_max: int = 64
    bytes_max: int = 2 << 30
    depth_max: int = 16


class Layer(Value, frozen=True):
    """A snapshot: of the set-up of `content`, or of a forked box (empty).

    needs: those beside `under` that its backend keeps for it: a squashed one stands on nothing, but
    a verifier over it is still given the set-ups by themselves. image: the base that was built, in
    place of a snapshot.
    """

    name: str
    under: str
    told: Snapshot
    content: str = ""
    needs: tuple[str, ...] = ()
    image: str = ""

    @property
    def below(self) -> tuple[str, ...]:
        """What may not go before it."""
        return (self.under, *self.needs) if self.under else self.needs


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

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._layers)

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
        """The snapshot and those that it cannot do without, each before what is below it."""
        found: dict[str, Layer] = {}
        ahead = [name]
        while ahead:
            layer = self._layers.get(ahead.pop(0))
            if layer is not None:
                found.pop(layer.name, None)
                found[layer.name] = layer
                ahead += layer.below
        return tuple(found.values())

    def set_ups_below(self, name: str) -> tuple[str, ...]:
        """What a snapshot still needs when it is squashed: the set-ups that it came from."""
        return tuple(layer.name for layer in self.chain(name)[1:] if layer.content)

    def check_room(self, coming: int) -> None:
        """Raises Exhausted when those in use, and so many more, are over the bounds.

        Unused ones make room.
        """
        used = {one.name: one for name in self._users.values() for one in self.chain(name)}
        held = sum(layer.told.size for layer in used.values())
        if len(used) + coming > self._rules.snapshots_max:
            field, value = "sandbox.snapshots_max", self._rules.snapshots_max
        elif held + coming > self._rules.bytes_max:  # each has a byte at least
            field, value = "sandbox.snapshot_bytes_max", self._rules.bytes_max
        else:
            return
        raise Exhausted(
            f"the box cannot be forked: {len(used)} snapshots of {held} bytes are in use",
            field=field,
            value=value,
            way_out="release boxes that are no longer needed, raise it, or add a sandbox host",
        )

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
        below = (layer.below for layer in self._layers.values())
        needed = set(self._users.values()).union(*below)
        unused = [layer for name, layer in self._layers.items() if name not in needed]
        for layer in unused:
            if self._set_ups.get(layer.content) != layer.name:
                return layer
        full = self.count > self._rules.snapshots_max or self.size > self._rules.bytes_max
        return min(unused, key=lambda one: self._last[one.name], default=None) if full else None
