"""The tree of policy versions of a run, and where the trainer stands in it.

Owns: which version came from which, and the lag between two. Promise: a version that the run never
made is an error, never a guess. Does not cover: divergence (divergence.py).

It is a tree and not a line: a trainer that goes back to an earlier checkpoint grows a new branch,
and episodes of the abandoned one are still of this run.
"""

from __future__ import annotations

from muster.errors import InvalidInput
from muster.leased import Trajectory
from muster.types import Value

NO_PARENT = -1
"""Parent of version 0, the model that the run began with."""

VERSIONS_KEPT = 4096
"""Newest versions remembered; a token older than that is far past any use."""


class Lineage(Value, frozen=True):
    """`parents` maps each known version to the one it was trained from."""

    parents: dict[int, int]
    current: int

    @property
    def next_version(self) -> int:
        """Above every version ever made, on any branch: numbers are never reused."""
        return max(self.parents) + 1

    def grow(self, version: int) -> Lineage:
        """The tree after one more step from the current version."""
        if version in self.parents:
            raise InvalidInput(
                "this version exists already",
                field="version",
                value=version,
                way_out=f"use {self.next_version}",
            )
        newest = sorted({**self.parents, version: self.current}.items())[-VERSIONS_KEPT:]
        return Lineage(dict(newest), version)

    def join(self, others: dict[int, int]) -> Lineage:
        """The tree with versions that other records know of; what is known here stands."""
        newest = sorted({**others, **self.parents}.items())[-VERSIONS_KEPT:]
        return Lineage(dict(newest), self.current)

    def lag(self, version: int) -> int:
        """Optimizer steps between `version` and the current one along the tree.

        Numbers may have holes (after going back), so this is no subtraction. For a version of an
        abandoned branch it is the way up to the fork and down again.
        """
        if version not in self.parents:
            raise InvalidInput(
                f"not a version of this run (the trainer stands at {self.current})",
                field="policy_version",
                value=version,
                way_out="collect with this run's own policy; discard what another run sampled",
            )
        up = {ancestor: steps for steps, ancestor in enumerate(self._path(self.current))}
        for down, ancestor in enumerate(self._path(version)):
            if ancestor in up:
                return up[ancestor] + down
        raise InvalidInput(
            f"shares no known ancestor with version {self.current}",
            field="policy_version",
            value=version,
            way_out="it is older than the versions kept; discard the trajectory",
        )

    def _path(self, version: int) -> list[int]:
        path: list[int] = []
        while version in self.parents:
            path.append(version)
            version = self.parents[version]
        return path


def trajectory_lag(lineage: Lineage, item: Trajectory) -> int | None:
    """Lag of a trajectory's first sampled token; None when it has none.

    Every other version in it must be one of the run's too (DESIGN §5.5).
    """
    lags = [lineage.lag(span.version) for segment in item.segments for span in segment.spans]
    return lags[0] if lags else None
