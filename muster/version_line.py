"""What a publisher decides: numbers of versions, and whom it tries again when.

Owns: `VersionLine`, `Tries`. Promise: pure; a number is never used for two sets of weights,
whatever trainer of the run made the first; a replica that keeps failing is tried ever more seldom,
and a new version is tried at once. Does not cover: records and transfer (publish.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from muster.errors import Refused
from muster.types import Value

LOOKS_MAX = 12  # between two tries of a replica that keeps failing


class Known(Value, frozen=True):
    """What the run's record says of one version."""

    parent: int
    digest: str


class VersionLine:
    """The versions of a run, as one trainer grows them. `current` is what its weights are."""

    def __init__(self, known: Mapping[int, Known], current: int, digest: str, served: int = 0):
        """digest: of the trainer's weights. served: the highest version that a replica serves: its
        record may be lost. Raises Refused when the run knows other weights as `current`."""
        self._newest = max([current, served, *known])
        self.current, self.digest = current, digest
        recorded = known.get(current)
        if recorded is not None and recorded.digest != digest:
            raise Refused(
                "the run knows this version with other weights",
                field=f"version {current} digest",
                value=digest[:12],
                way_out="load the weights of the checkpoint that you resume from (the model that "
                "the run began with, without one), or begin another run",
            )
        self.recorded = recorded is not None

    def seal(self) -> tuple[int, int]:
        """Number and parent of the next version; it counts from now on, come what may."""
        self._newest += 1
        return self._newest, self.current

    def sealed(self, version: int, digest: str) -> None:
        """The trainer's weights are that version."""
        self.current, self.digest, self.recorded = version, digest, True


class Tries:
    """Which replicas are left alone at a look, because they failed at the one before."""

    def __init__(self) -> None:
        self._looks = 0
        self._failed: dict[str, tuple[int, int]] = {}  # replica → tries, look of the next one

    def look(self) -> list[str]:
        """A look begins: replicas to be skipped."""
        self._looks += 1
        return [name for name, (_, again) in self._failed.items() if self._looks < again]

    def took(self, tried: Iterable[tuple[str, bool]]) -> list[str]:
        """(replica, served it) of each that was tried; those whose failure should be told: at
        tries 1, 2, 4, 8 …"""
        told = []
        for name, served in tried:
            tries = self._failed.pop(name, (0, 0))[0] + 1
            if served:
                continue
            wait = min(2 ** (tries - 1), LOOKS_MAX)
            self._failed[name] = tries, self._looks + wait
            if tries & (tries - 1) == 0:
                told.append(name)
        return told

    def forget(self) -> None:
        """There is a new version."""
        self._failed.clear()
