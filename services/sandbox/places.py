"""The boxes of a host by state, and how many there may be. Pure.

Owns: their table and names. Does not cover: which of them begins or ends when (pool.py).
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

from msgspec.structs import replace

from muster.types import EpisodeKey, Value
from services.sandbox.events import Asked
from services.sandbox.warm import Kind


class PoolRules(Value, frozen=True):
    """Bounds; idle_s, adopt_s, warm_idle_s in seconds."""

    boxes_max: int = 32
    starting_max: int = 4
    waiting_max: int = 256
    idle_s: float = 1800.0
    adopt_s: float = 600.0
    warm_max: int = 0
    warm_idle_s: float = 120.0
    building_max: int = 2


class BoxState(StrEnum):
    BUILDING = "building"  # a set-up runs in it; nobody will get it
    STARTING = "starting"
    WARM = "warm"
    HANDING = "handing"  # warm, and being looked at for a caller
    READY = "ready"
    ENDING = "ending"


class Place:
    """One box as the pool knows it."""

    __slots__ = ("adopted", "asked", "doomed", "key", "kind", "state", "touched", "working")

    def __init__(self, state: BoxState, now: float, kind: Kind | None):
        self.state, self.touched, self.kind = state, now, kind
        self.key: EpisodeKey | None = None  # whose it is or will be
        self.asked: Asked | None = None  # by whom, while it is being handed over
        self.adopted = False  # from a former service, and not used since
        self.working = 0  # steps, verifications and copies that run in it
        self.doomed = ""  # why it has to end as soon as it has started

    @property
    def spare(self) -> bool:
        """Whether it is for nobody yet, and would not end anyway."""
        standing = self.state in (BoxState.WARM, BoxState.STARTING)
        return standing and self.key is None and not self.doomed

    @property
    def leaving(self) -> bool:
        return self.state is BoxState.ENDING or bool(self.doomed)

    @property
    def content(self) -> str:
        return "" if self.kind is None else self.kind.content


class Places(dict[str, Place]):
    """Boxes by name."""

    def __init__(self, rules: PoolRules, prefix: str):
        super().__init__()
        self.rules, self._prefix = rules, prefix
        self._count = 0

    def resize(self, boxes_max: int, warm_max: int) -> None:
        self.rules = replace(self.rules, boxes_max=boxes_max, warm_max=warm_max)

    def take(self, state: BoxState, now: float, kind: Kind | None) -> str:
        """A new box's name."""
        self._count += 1
        name = f"{self._prefix}-{self._count}"
        self[name] = Place(state, now, kind)
        return name

    def count(self, state: BoxState) -> int:
        return sum(box.state is state for box in self.values())

    @property
    def room(self) -> bool:
        return len(self) < self.rules.boxes_max

    @property
    def runs(self) -> set[str]:
        """The runs that boxes belong to."""
        return {box.key.run for box in self.values() if box.key is not None}

    @property
    def setups(self) -> set[str]:
        """The contents whose set-up runs."""
        return {box.content for box in self.values() if box.state is BoxState.BUILDING}

    @property
    def spare(self) -> list[str]:
        """Boxes for nobody yet, the one that stands longest first."""
        found = [(box.touched, name) for name, box in self.items() if box.spare]
        return [name for _, name in sorted(found)]

    @property
    def coming(self) -> Counter[Kind | None]:
        """Spare boxes that still start, by kind."""
        starting = BoxState.STARTING
        return Counter(b.kind for b in self.values() if b.spare and b.state is starting)

    def warm(self, kind: Kind) -> str:
        """A warm box of the kind, the first made; or nothing."""
        for name, box in self.items():
            if box.state is BoxState.WARM and box.kind == kind:
                return name
        return ""
