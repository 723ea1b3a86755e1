"""The outer world of a trainer in memory: a bank, the versions stream, replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

from msgspec.structs import replace

from muster.errors import Refused, Unavailable
from muster.leased import FrozenBatch, GroupBack, TrainBatch
from muster.transfer.newest import Newest
from services.trainer.ports import (
    KnownVersion,
    Publication,
    Registration,
    ReplicaReport,
    VersionRecord,
)


class FakeBank:
    """Leases the batches it was given, in order; remembers what was acknowledged."""

    def __init__(self, batches: dict[int, TrainBatch]):
        self.batches, self.acknowledged = batches, [0]
        self.leased: set[int] = set()
        self.registered: list[int] = []
        self.brought: list[int] = []  # steps of the batches of the last registration
        self.oldest_kept = self.mark = 0  # mark: what came up to there is deleted
        self.spare: list[TrainBatch] = []  # what comes in the place of what was given back
        self.returned: list[tuple[int, str]] = []
        self.away = 0  # so many calls fail before the next succeeds
        self.drained = asyncio.Event()  # a lease waits for a batch that does not exist

    async def register(
        self, last_durable_step: int, batches: Sequence[FrozenBatch], oldest_kept_step: int
    ) -> Registration:
        """See ports.Bank."""
        self._reach()
        if last_durable_step < self.mark:
            problem = f"the groups up to step {self.mark} are deleted"
            raise Refused(problem, field="last_durable_step", value=last_durable_step)
        self.oldest_kept = oldest_kept_step
        self.registered.append(last_durable_step)
        self.brought = [batch.step for batch in batches]
        unseen = tuple(step for step in sorted(self.leased) if step > last_durable_step)
        return Registration(last_durable_step + 1, unseen)

    async def lease(self, step: int) -> TrainBatch:
        """See ports.Bank."""
        self._reach()
        if step not in self.batches:
            self.drained.set()
            await asyncio.Event().wait()
        self.leased.add(step)
        return self.batches[step]

    async def return_groups(self, step: int, groups: Sequence[GroupBack]) -> int:
        """See ports.Bank. The whole of a spare batch takes the place of each group."""
        self._reach()
        batch = self.batches.get(step)
        if batch is None or step in self.acknowledged:
            raise Refused("this step is acknowledged, or was not leased", field="step", value=step)
        for group in groups:
            if group.group in batch.frozen.returned:
                continue
            if group.group not in batch.groups:
                raise Refused("it is not in the batch", field="groups", value=group.group)
            batch = self.batches[step] = _replaced(batch, group.group, self.spare.pop(0))
            self.returned.append((step, group.group))
        return len(groups)

    async def acknowledge(self, step: int, oldest_kept_step: int) -> int:
        """See ports.Bank."""
        self._reach()
        self.oldest_kept = oldest_kept_step
        self.acknowledged.append(step)
        self.mark = max(self.mark, min(oldest_kept_step, step))
        return len(self.batches[step].groups)

    def _reach(self) -> None:
        if self.away:
            self.away -= 1
            raise Unavailable("the bank restarts")


def _replaced(batch: TrainBatch, group: str, other: TrainBatch) -> TrainBatch:
    frozen = batch.frozen
    stays = tuple(m for m in frozen.members if m.group != group)
    return replace(
        batch,
        frozen=replace(
            frozen,
            members=(*stays, *other.frozen.members),
            revision=frozen.revision + 1,
            returned=(*frozen.returned, group),
        ),
        trajectories=(
            *(t for t in batch.trajectories if t.group != group),
            *other.trajectories,
        ),
        returns_left=batch.returns_left - 1,
    )


class FakeVersionLog:
    """Keeps records in memory, one per (version, stage)."""

    def __init__(self) -> None:
        self.records: list[VersionRecord] = []
        self.process = "first"
        self.changed = asyncio.Condition()

    async def server(self) -> str:
        """See ports.VersionLog."""
        return self.process

    def lose(self, records: int) -> None:
        """A power cut takes the newest ones."""
        self.process = "next"
        del self.records[-records:]

    async def known(self) -> dict[int, KnownVersion]:
        """See ports.VersionLog."""
        return {r.version: KnownVersion(r.parent, r.digest) for r in self.records}

    async def append(self, record: VersionRecord) -> None:
        """See ports.VersionLog."""
        if (record.version, record.stage) not in {(r.version, r.stage) for r in self.records}:
            self.records.append(record)
            async with self.changed:
                self.changed.notify_all()


class FakeFleet:
    """Replicas that take any version; `failing` ones report an error. `line` is set while versions
    pass."""

    def __init__(self, *names: str):
        self.serving = dict.fromkeys(names, 0)
        self.failing: set[str] = set()
        self.published: list[int] = []
        self.begun: list[int] = []
        self.line = asyncio.Event()
        self.line.set()
        self._taken: Newest[str] = Newest()

    def take(self, state: dict[str, Any], version: int, parent: int) -> str:
        """See ports.Fleet."""
        del parent
        self._taken.keep(version, str(state))
        return str(state)

    async def newest(self) -> int:
        """See ports.Fleet."""
        return max(self.serving.values(), default=0)

    async def publish(self, version: int, parent: int, skip: Collection[str] = ()) -> Publication:
        """See ports.Fleet."""
        del parent
        self._taken.of(version)
        self.begun.append(version)
        await self.line.wait()
        served = self.serving.items()
        stale = [name for name, at in served if at != version and name not in skip]
        reports = []
        for name in stale:
            failed = name in self.failing
            reports.append(ReplicaReport(name, error="it fails" if failed else ""))
            self.serving[name] = self.serving[name] if failed else version
        if stale:
            self.published.append(version)
        serving = sum(at == version for at in self.serving.values())
        return Publication(tuple(reports), serving)
