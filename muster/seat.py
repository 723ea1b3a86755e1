"""The one place at which a run is trained.

Owns: `Seat`, which a trainer takes and every later one takes from it; `ResumePoint`, what a
checkpoint has to remember so that its trainer can come back. Promise: whoever sat there before is
fenced in the streams, at the bank and at the replicas; a resume point is in its folder whole or not
at all. Does not cover: what is done there (bank.py, publish.py).
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from redis.asyncio import Redis

from muster.config import Config
from muster.errors import InvalidInput, Refused
from muster.leased import FrozenBatch
from muster.registry import Registry
from muster.streams import connect
from muster.trainer_epoch import take_epoch
from muster.types import Value

RESUME_FILE = "muster.json"
SEALED_MAX = 64  # steps whose checkpoints may still be on their way
NO_PARENT = -1
"""Parent of version 0, the model that the run began with."""


class ResumePoint(Value, frozen=True):
    """Where a checkpoint stands: its newest step, the version of its weights ("" as digest: never
    published), and the batches that it has and the checkpoint before it had not."""

    run: str
    step: int = 0
    epoch: int = 0
    version: int = 0
    parent: int = NO_PARENT
    digest: str = ""
    batches: tuple[FrozenBatch, ...] = ()


@dataclass
class Seat:
    """One trainer incarnation in a run, and where its weights stand."""

    config: Config
    redis: Redis
    registry: Registry
    run: str
    epoch: int
    version: int = 0
    parent: int = NO_PARENT
    digest: str = ""
    step: int = 0  # newest one in the checkpoint that it resumed from
    sealed: dict[int, tuple[int, int, str]] = field(default_factory=dict)  # by step, the newest

    def seal(self, step: int) -> None:
        """The weights are now those that `step` made: a checkpoint of it may be finished later."""
        now = {**self.sealed, step: (self.version, self.parent, self.digest)}
        self.sealed = dict(sorted(now.items())[-SEALED_MAX:])

    def weights(self, step: int) -> tuple[int, int, str]:
        """Version, parent and digest of what `step` made; where nobody said, what is sealed now."""
        return self.sealed.get(step, (self.version, self.parent, self.digest))


@asynccontextmanager
async def take_seat(config: Config, resume: ResumePoint | None = None) -> AsyncIterator[Seat]:
    """A seat in the run of `config`, which names a Redis.

    Raises Refused for a resume point of another run, Unavailable, ConfigError.
    """
    at = resume or ResumePoint(config.run)
    if at.run != config.run:
        raise Refused(
            f"this checkpoint is of run {at.run!r}",
            field="run",
            value=config.run,
            way_out="resume from a checkpoint of this run, or from none",
        )
    async with connect(config.redis) as redis:
        epoch = await take_epoch(redis, config.run, at.epoch)
        registry = Registry(redis, config.run)
        weights = at.version, at.parent, at.digest
        yield Seat(config, redis, registry, config.run, epoch, *weights, step=at.step)


def read_resume(folder: Path) -> ResumePoint | None:
    """What `write_resume` left there; None when nothing. Raises InvalidInput for a damaged one."""
    path = folder / RESUME_FILE
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=ResumePoint)
    except msgspec.DecodeError as error:
        raise InvalidInput(
            f"not what a trainer wrote there: {error}",
            field="resume",
            value=path,
            way_out="resume from another checkpoint",
        ) from error


def write_resume(folder: Path, at: ResumePoint) -> None:
    """Durable when it returns. Raises InvalidInput when there is no such folder."""
    if not folder.is_dir():
        raise InvalidInput(
            "there is no such checkpoint folder",
            field="checkpoint",
            value=folder,
            way_out="save the weights first, then acknowledge",
        )
    draft = folder / f".{RESUME_FILE}"
    with draft.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(at), indent=1) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    draft.rename(folder / RESUME_FILE)
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
