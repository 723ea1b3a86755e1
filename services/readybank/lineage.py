"""The policy versions of a run, and which of them stand in the line of the newest one.

Owns: the line. Promise: a version is `KNOWN` when the newest version descends from it, `ABANDONED`
when the run made it on a branch that a trainer went back from, `AWAITED` when its record may still
come, or that of a parent through which the newest one may descend from it: a power cut takes
records, and their trainer writes them again after newer ones. `FOREIGN` otherwise; so are those
that were forgotten because nothing refers to them any more. Numbers are never reused and may have
holes, so the line follows parents. Does not cover: how stale a version is.
"""

from __future__ import annotations

from enum import StrEnum


class Standing(StrEnum):
    """What is known of a version."""

    KNOWN = "known"
    ABANDONED = "abandoned"
    AWAITED = "awaited"
    FOREIGN = "foreign"


class Lineage:
    """Starts with version 0, the model as it was given."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}
        self._line: set[int] = {0}
        self._newest = 0
        self._gap = 0  # a parent in the line without a record, above recorded versions; 0: none
        self.published = 0

    def see(self, version: int, parent: int, *, published: bool) -> bool:
        """Take a record; True when the line changed."""
        if published:
            self.published = max(self.published, version)
        if version in self._parents:
            return False
        self._parents[version] = parent
        straight = parent == self._newest and version > self._newest
        self._newest = max(self._newest, version)
        before = self._line
        if straight:
            self._line = before | {version}
            return True
        self._line, gap = self._ancestry(self._newest), self._gap
        root = min(self._line)
        self._gap = root if root not in self._parents and min(self._parents) < root else 0
        return self._line != before or self._gap != gap

    def standing(self, version: int) -> Standing:
        if version in self._line:
            return Standing.KNOWN
        if version in self._parents or version == 0:
            if version < self._gap:
                return Standing.AWAITED
            return Standing.ABANDONED if version else Standing.FOREIGN
        return Standing.AWAITED if version > self._newest else Standing.FOREIGN

    @property
    def newest(self) -> int:
        """The version whose line counts."""
        return self._newest

    def line(self) -> list[int]:
        """The newest version and its ancestors, as far as they are remembered, newest first."""
        found = [self._newest]
        while (parent := self._parents.get(found[-1], -1)) in self._line and parent < found[-1]:
            found.append(parent)
        return found

    def forget(self, below: int) -> None:
        """Versions under `below` are not asked for again."""
        below = min(below, self._newest)
        self._parents = {v: parent for v, parent in self._parents.items() if v >= below}
        self._line = {version for version in self._line if version >= below}

    def _ancestry(self, version: int) -> set[int]:
        line = {version}
        while True:
            parent = self._parents.get(version, -1)
            if parent < 0 or parent >= version:  # a root may name itself or nothing
                return line
            line.add(parent)
            version = parent
