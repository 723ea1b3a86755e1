"""One replica at work: the pure state of replica.py around an engine.

Owns: the order of I/O of each verb. Promises: a call is admitted before the engine hears of it and
released however it ends; what a former owner left running is ended when a newer one speaks;
prepare answers at once; an apply that fails fences the replica; fencing ends what runs.
Does not cover: protobuf (server.py), weights (adapters/).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from enum import Enum
from typing import Any, Self

from msgspec.structs import replace

from muster import failpoints, telemetry
from muster.errors import InvalidInput, MusterError, Unavailable
from muster.transfer.active import ActiveRequests
from muster.transfer.arriving import Source
from muster.transfer.manifest import Manifest, check_complete
from muster.types import EpisodeKey
from services.inference.engine import (
    ApplyFailed,
    Chunk,
    CommitFigures,
    Engine,
    Finish,
    Load,
    Sampling,
    Scored,
    UpdatePhase,
    UpdateStatus,
)
from services.inference.replica import Grant, Replica, State, engine_name
from services.inference.sampling import check_sampling

_log = telemetry.logger("muster.inference")


class _Arrival(Enum):
    """How much of the update in hand the publisher has heard of."""

    BEGUN = "begun"
    WATCHED = "watched"
    TOLD = "told"  # that it is staged; or there is none


class ReplicaDriver:
    """The verbs of one replica, in domain types."""

    def __init__(
        self,
        replica: Replica,
        engine: Engine,
        *,
        receive_timeout_s: float,
        expected: Mapping[str, tuple[int, ...]] | None = None,
    ):
        """expected: name → shape of the checkpoint served; None: any manifest is taken as whole."""
        self.replica, self.engine = replica, engine
        self.experts_dropped = 0  # replies without their routing: it was too large
        self._expected = expected
        self._receive_timeout_s = receive_timeout_s
        self._arrival = _Arrival.TOLD
        self._updating = asyncio.Lock()
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *reason: Any) -> None:
        """End the engine, then wait for an apply that it cut off."""
        del reason
        try:
            await self.shutdown()
        finally:
            # Without the reason: what went wrong in the block is to be seen as it is.
            await self._tasks.__aexit__(None, None, None)

    async def start(
        self, version: int, published: Callable[[], Awaitable[int | None]] | None = None
    ) -> None:
        """Start the engine; when its canary has passed SERVING, or FENCED (Replica.started).

        published: asks for the version that is served elsewhere; after the start, which may take
        minutes.
        """
        await self.engine.start(version)
        self.replica.started(version, await published() if published else None)
        if self.replica.state is State.FENCED:
            _log.warning("fenced until the trainer has sent it: %s", self.replica.why_fenced)

    async def generate(
        self, key: EpisodeKey, request: Sampling
    ) -> AsyncGenerator[Chunk | Finish, None]:
        """Chunks, then one Finish."""
        check_sampling(request.params, self.engine.mask_ids_max)
        name = self.replica.admit_request(
            key, request.request_id, prompt=len(request.prompt), max_tokens=request.max_tokens
        )
        try:
            await self._end_orphans()
            await failpoints.at("inference.generate.before")
            async with aclosing(self.engine.sample(replace(request, request_id=name))) as stream:
                self.replica.check_still_owner(name)
                async for item in stream:
                    if isinstance(item, Finish):
                        self.experts_dropped += item.experts_dropped
                        await failpoints.at("inference.generate.after")
                    self.replica.check_still_owner(name)
                    yield item
        finally:
            self.replica.release_request(name)

    async def abort(self, key: EpisodeKey, request_id: str) -> bool:
        """End a request of an owner that is still the owner."""
        self.replica.check_owner(key)
        return await self.engine.abort(engine_name(key, request_id))

    async def claim(self, run: str, owner_epoch: int) -> int:
        """Refuse older owners from now on, end their requests; how many were running."""
        self.replica.claim(run, owner_epoch)
        return await self._end_orphans()

    async def grant(self, run: str, owner_epoch: int, load: Load) -> Grant:
        """A credit for the owner; what a former one left running is ended."""
        grant = self.replica.grant(run, owner_epoch, load)
        await self._end_orphans()
        return grant

    async def _end_orphans(self) -> int:
        orphans = self.replica.orphans
        for name in orphans:
            await self.engine.abort(name)
        return len(orphans)

    async def score(self, token_ids: tuple[int, ...], temperature: float) -> Scored:
        """Log-probabilities of the tokens after the first."""
        self.replica.admit_score(len(token_ids))
        try:
            return await self.engine.score(token_ids, temperature)
        finally:
            self.replica.release_score()

    async def prepare(self, run: str, epoch: int, manifest: Manifest, source: Source) -> int:
        """Start receiving; the version served now. What was arriving before is dropped."""
        self.replica.check_trainer(run, epoch)
        self.replica.check_prepare(manifest.version, manifest.parent)
        if self._expected is not None:
            check_complete(manifest, self._expected)
        if not 0 < source.timeout_s <= self._receive_timeout_s:
            raise InvalidInput(
                "time limit of the transfer is out of range",
                field="source.deadline_s",
                value=source.timeout_s,
                way_out=f"at most inference.receive_timeout_s = {self._receive_timeout_s}",
            )
        await failpoints.at("inference.prepare.before")
        async with self._updating:
            await self.engine.abort_update()
            await self.engine.prepare_update(manifest, source)
        self._arrival = _Arrival.BEGUN
        await failpoints.at("inference.prepare.after")
        return self.replica.version

    async def commit(
        self,
        run: str,
        epoch: int,
        version: int,
        active: ActiveRequests = ActiveRequests.RECOMPUTE,
    ) -> CommitFigures:
        """Apply what is staged. A caller that goes away does not cut the apply in half."""
        self.replica.check_trainer(run, epoch)
        await failpoints.at("inference.commit.before")
        work = self._tasks.create_task(self._commit(version, active), name=f"commit-{version}")
        outcome = await asyncio.shield(work)
        if isinstance(outcome, MusterError):
            raise outcome
        await failpoints.at("inference.commit.after")
        return outcome

    async def _commit(self, version: int, active: ActiveRequests) -> CommitFigures | MusterError:
        """Expected failures are returned: raised, they would end the whole task group."""
        async with self._updating:
            try:
                self.replica.begin_commit()
            except MusterError as error:
                return error
            try:
                figures = await self.engine.commit_update(version, active)
            except MusterError as error:
                self.replica.commit_refused()
                return error
            except ApplyFailed as error:
                self.replica.apply_failed(f"version {version}: {error}")
                _log.error("fenced: %s", error)
                return _fenced(version)
            except BaseException:
                # Cut off half way: nobody knows what the engine holds.
                self.replica.apply_failed(f"version {version}: the apply was cut off")
                raise
            self.replica.committed(version)
            return figures

    async def abort_update(self, run: str, epoch: int, version: int, *, fence: bool) -> int:
        """Drop what is arriving or staged; the version served.

        fence: others serve `version`; unless this replica does too, it serves nothing from here on
        and what runs is aborted. A caller that goes away does not stop that half way.
        """
        self.replica.check_trainer(run, epoch)
        work = self._tasks.create_task(self._abort_update(version, fence), name=f"abort-{version}")
        problem = await asyncio.shield(work)
        if problem is not None:
            raise problem
        return self.replica.version

    async def _abort_update(self, version: int, fence: bool) -> MusterError | None:
        async with self._updating:  # an apply in hand ends first: it may have succeeded
            if fence:
                self.replica.missed(version)
            try:
                if self.replica.state is State.FENCED:
                    _log.warning("fenced: %s", self.replica.why_fenced)
                    for name in self.replica.requests:
                        await self.engine.abort(name)
                await self.engine.abort_update()
            except MusterError as error:
                return error
        return None

    async def update_status(self) -> UpdateStatus:
        """IDLE until the engine runs, and while it applies (its verbs wait for it then)."""
        if self.replica.state is State.STARTING or self.replica.committing:
            return UpdateStatus()
        if self._arrival is _Arrival.BEGUN:
            self._arrival = _Arrival.WATCHED
            await failpoints.at("inference.stage.before")
        status = await self.engine.update_status()
        if status.phase is UpdatePhase.STAGED and self._arrival is _Arrival.WATCHED:
            self._arrival = _Arrival.TOLD
            await failpoints.at("inference.stage.after")
        if status.phase is UpdatePhase.FAILED:
            _log.warning("update failed", extra={"version": status.version, "why": status.error})
        return status

    async def shutdown(self) -> None:
        """Admit nothing more, end the engine."""
        self.replica.drain()
        await self.engine.shutdown()


def _fenced(version: int) -> MusterError:
    return Unavailable(
        "the apply failed half way; the replica is fenced and serves nothing",
        field="version",
        value=version,
        way_out="publish a version again in full, or restart the replica",
    )
