"""What the trainer needs from the outer world, as seats for adapters.

Owns: the carriers that cross those seats. Promise: no protobuf, no torch, no address in them.
Errors are those of muster.errors: Unavailable may be retried, Fenced means that another trainer
has taken over.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Any, Protocol

from muster.bank_calls import Registration as Registration
from muster.leased import FrozenBatch, GroupBack, TrainBatch
from muster.types import Value
from services.trainer.figures import StepReport


class ReplicaReport(Value, frozen=True):
    """How one replica took a version; `error` is empty when it serves it."""

    replica: str
    latency_s: float = 0.0
    pause_s: float = 0.0
    token_gap_s: float = 0.0
    receive_s: float = 0.0
    apply_s: float = 0.0
    requests_recomputed: int = 0
    tokens_lost: int = 0
    requests_finished: int = 0
    requests_aborted: int = 0
    requests_kept: int = 0
    error: str = ""


class Stage(StrEnum):
    """What has become of a version. One is never both first `TRAINED` and first `DURABLE`."""

    TRAINED = "trained"  # in memory only; said before it is published
    DURABLE = "durable"
    PUBLISHED = "published"


class PublicationTimes(Value, frozen=True):
    """Seconds of one publication: from the version's making until it was begun (another one was
    under way), from then until it ended, and how long the trainer trained within both."""

    waited_s: float = 0.0
    took_s: float = 0.0
    trained_meanwhile_s: float = 0.0


class VersionRecord(Value, frozen=True):
    """One entry of the versions stream. `checkpoint` is empty while there is none."""

    version: int
    parent: int
    digest: str
    checkpoint: str
    stage: Stage = Stage.DURABLE
    report: StepReport | None = None
    publications: tuple[ReplicaReport, ...] = ()
    times: PublicationTimes = PublicationTimes()


class Bank(Protocol):
    """The ready bank. Every call is retried by its caller, so each must be idempotent there."""

    async def register(
        self, last_durable_step: int, batches: Sequence[FrozenBatch], oldest_kept_step: int
    ) -> Registration:
        """`batches`: those that the newest checkpoint has and the one before it had not, in order:
        a bank that lost its records of them takes them from here.

        `oldest_kept_step`: this trainer never goes back further; 0 while it may go back to the
        model that the run began with.
        """

    async def lease(self, step: int) -> TrainBatch:
        """Waits until the batch is there."""

    async def return_groups(self, step: int, groups: Sequence[GroupBack]) -> int:
        """Gives groups of the leased batch of `step` back: it is to be leased again then. Answers
        how many are back, by this call or an earlier one. Raises Refused for what was acknowledged,
        is not in the batch, or once too often (`TrainBatch.returns_left`)."""

    async def acknowledge(self, step: int, oldest_kept_step: int) -> int:
        """That step and all before it are durable. Answers the groups of that step."""


class KnownVersion(Value, frozen=True):
    """What the versions stream says of one version."""

    parent: int
    digest: str


class VersionLog(Protocol):
    """The versions stream of the run."""

    async def server(self) -> str:
        """Name of the process that keeps the stream: another one may have lost what came last."""

    async def known(self) -> dict[int, KnownVersion]:
        """Every version ever recorded."""

    async def append(self, record: VersionRecord) -> None:
        """Equal (version, stage) is written once."""


class Publication(Value, frozen=True):
    """What a publication came to. `serving` counts replicas that serve the version now."""

    reports: tuple[ReplicaReport, ...] = ()
    serving: int = 0


class Fleet(Protocol):
    """All inference replicas of the run, and the snapshots that they are sent."""

    def take(self, state: dict[str, Any], version: int, parent: int) -> str:
        """Copy a set of weights as that version, to be published later, whatever is trained in the
        meantime; its digest: equal weights, equal digest. Runs in a worker thread.

        Kept are the newest two: one may still be under way while the next is made.
        """

    async def newest(self) -> int:
        """The highest version that a replica says it serves, 0 without any. A restarted Redis may
        have lost its record: its number is used all the same."""

    async def publish(self, version: int, parent: int, skip: Collection[str] = ()) -> Publication:
        """Bring a version that was taken to every replica that does not serve it, but those in
        `skip`.

        Only Fenced is raised; a replica that fails has its error in its report.
        """
