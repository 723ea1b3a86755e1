"""The ready bank over gRPC, as a trainer calls it.

Owns: finding the bank in the registry, the calls, and their translation. Promise: every call has a
deadline; a lease that is cut or cancelled ends its stream on the server's side too.
Does not cover: retries (the reference trainer's, or those of bank.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import grpc

from muster import codec, payload, rpc, segment_codec
from muster.errors import InvalidInput, Unavailable
from muster.leased import BatchMember, FrozenBatch, GroupBack, TrainBatch, Trajectory
from muster.registry import Entry, Registry
from muster.streams import reaching_redis
from muster.types import Value
from muster.v1 import events_pb2 as ev
from muster.v1 import readybank_pb2 as pb
from muster.v1.readybank_pb2_grpc import ReadyBankServiceStub

if TYPE_CHECKING:
    from muster.v1.readybank_pb2_grpc import ReadyBankServiceAsyncStub


class Registration(Value, frozen=True):
    """The bank's answer to a new trainer incarnation."""

    next_step: int
    steps_unseen: tuple[int, ...]


GROUPS_PER_BATCH = "groups_per_batch"
"""What a bank tells of itself beside its address: this setting of its run."""
_REVISIONS_MAX = 128


async def groups_announced(registry: Registry) -> int:
    """Groups of a batch of that run, as its bank has them; 0 when the bank does not say. Raises
    Unavailable."""
    told = (await _newest(registry)).info.get(GROUPS_PER_BATCH, "")
    return int(told) if told.isdigit() else 0


async def _newest(registry: Registry) -> Entry:
    with reaching_redis():
        found = await registry.list("readybank")
    if not found:
        raise Unavailable("no ready bank has announced itself", way_out="start one")
    return found[-1]


class GrpcBank:
    """One trainer incarnation's view of the bank; a channel per call, as the bank may move."""

    def __init__(
        self,
        registry: Registry,
        *,
        run: str,
        epoch: int,
        groups: int,
        lease_wait_s: float,
        call_deadline_s: float,
    ):
        self._registry, self._run, self._epoch, self._groups = registry, run, epoch, groups
        self._lease_wait_s, self._deadline_s = lease_wait_s, call_deadline_s
        self._revisions: dict[int, int] = {}  # of batches that came, by step; the newest of them

    async def register(
        self, last_durable_step: int, batches: Sequence[FrozenBatch], oldest_kept_step: int
    ) -> Registration:
        """Fence every former trainer. `batches` and `oldest_kept_step`: see readybank.proto."""
        request = pb.RegisterTrainerRequest(
            run=self._run,
            trainer_epoch=self._epoch,
            last_durable_step=last_durable_step,
            batches=[frozen_to_pb(self._run, batch) for batch in batches],
            oldest_kept_step=oldest_kept_step,
        )
        async with rpc.channel(await self._address()) as channel:
            stub: ReadyBankServiceAsyncStub = ReadyBankServiceStub(channel)
            with rpc.calling("RegisterTrainer"):
                answer = await stub.RegisterTrainer(request, timeout=self._deadline_s)
        return Registration(answer.next_step, tuple(answer.steps_unseen))

    async def lease(self, step: int) -> TrainBatch:
        """Waits for the batch. Raises TimeoutError when `lease_wait_s` ends without one."""
        request = pb.LeaseBatchRequest(
            run=self._run,
            trainer_epoch=self._epoch,
            step=step,
            groups=self._groups,
            former_revision=self._revisions.get(step - 1),
        )
        parts: list[pb.LeaseBatchResponse] = []
        async with rpc.channel(await self._address()) as channel:
            stub: ReadyBankServiceAsyncStub = ReadyBankServiceStub(channel)
            call = stub.LeaseBatch(request, timeout=self._lease_wait_s)
            try:
                with rpc.calling("LeaseBatch"):
                    async for part in call:
                        parts.append(part)
            except Unavailable:
                if await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise TimeoutError from None
                raise
            finally:
                call.cancel()
        batch = batch_from_pb(parts)
        newest = {**self._revisions, step: batch.frozen.revision}
        self._revisions = dict(sorted(newest.items())[-_REVISIONS_MAX:])
        return batch

    async def return_groups(self, step: int, groups: Sequence[GroupBack]) -> int:
        """Gives groups of the leased batch of `step` back: it is to be leased again then. Answers
        how many are back, by this call or an earlier one. Raises Refused for what was acknowledged,
        is not in the batch, or once too often (`TrainBatch.returns_left`)."""
        request = pb.ReturnGroupsRequest(
            run=self._run,
            trainer_epoch=self._epoch,
            step=step,
            groups=[
                pb.ReturnedGroup(group=g.group, reason=g.reason, measured_kl=g.measured_kl)
                for g in groups
            ],
        )
        self._revisions.pop(step, None)  # unknown until it is leased again
        async with rpc.channel(await self._address()) as channel:
            stub: ReadyBankServiceAsyncStub = ReadyBankServiceStub(channel)
            with rpc.calling("ReturnGroups"):
                answer = await stub.ReturnGroups(request, timeout=self._deadline_s)
        return int(answer.returned)

    async def acknowledge(self, step: int, oldest_kept_step: int) -> int:
        """That step and all before it are durable. Answers the groups of that step."""
        request = pb.AcknowledgeBatchRequest(
            run=self._run,
            trainer_epoch=self._epoch,
            step=step,
            oldest_kept_step=oldest_kept_step,
            revision=self._revisions.get(step),
        )
        async with rpc.channel(await self._address()) as channel:
            stub: ReadyBankServiceAsyncStub = ReadyBankServiceStub(channel)
            with rpc.calling("AcknowledgeBatch"):
                answer = await stub.AcknowledgeBatch(request, timeout=self._deadline_s)
        return int(answer.groups_trained)

    async def _address(self) -> str:
        return (await _newest(self._registry)).address


def batch_from_pb(parts: list[pb.LeaseBatchResponse]) -> TrainBatch:
    """A leased batch from its stream; it must be whole (every group that the header names).

    Raises Refused, naming the payload, for a turn that cannot be read.
    """
    if not parts or parts[0].WhichOneof("part") != "header":
        raise Unavailable("the lease ended before its header", way_out="lease again")
    header = parts[0].header
    items = tuple(_trajectory(part.trajectory) for part in parts[1:])
    expected = {(m.group, i): a for m in header.members for i, a in enumerate(m.attempts)}
    found = {(item.group, item.sibling): item.attempt for item in items}
    if found != expected or len(items) != len(expected):
        raise InvalidInput(
            f"the header names {len(expected)} trajectories, {len(items)} came and they differ",
            field="batch",
            value=f"{header.run}/{header.step}",
            way_out="see the ready bank's log: a frozen batch must be sent whole",
        )
    predicted = {
        item.id: part.trajectory.predicted_kl
        for item, part in zip(items, parts[1:], strict=True)
        if part.trajectory.HasField("predicted_kl")
    }
    return TrainBatch(frozen_from_pb(header), items, predicted, parts[0].returns_left)


def frozen_from_pb(record: ev.BatchRecord) -> FrozenBatch:
    return FrozenBatch(
        step=record.step,
        members=tuple(BatchMember(m.group, tuple(m.attempts)) for m in record.members),
        asked_unix_s=record.asked_unix_s,
        complete_unix_s=record.complete_unix_s,
        trainer_epoch=record.trainer_epoch,
        policy_version=record.policy_version,
        revision=record.revision,
        returned=tuple(record.returned),
        groups=record.groups,
    )


def frozen_to_pb(run: str, batch: FrozenBatch) -> ev.BatchRecord:
    return ev.BatchRecord(
        run=run,
        step=batch.step,
        stage=ev.BATCH_STAGE_FROZEN,
        members=[ev.BatchMember(group=m.group, attempts=m.attempts) for m in batch.members],
        asked_unix_s=batch.asked_unix_s,
        complete_unix_s=batch.complete_unix_s,
        trainer_epoch=batch.trainer_epoch,
        policy_version=batch.policy_version,
        revision=batch.revision,
        returned=batch.returned,
        groups=batch.groups,
    )


def _trajectory(message: pb.LeasedTrajectory) -> Trajectory:
    return Trajectory(
        group=message.group,
        task=message.task,
        sibling=message.sibling,
        attempt=message.attempt,
        label=codec.label_from_pb(message.label),
        segments=tuple(
            segment_codec.segment_from_pb(segment)
            for turn in message.turns
            for segment in payload.unpacked(turn.key, turn.payload).segments
        ),
        sampling=codec.sampling_from_pb(message.sampling),
    )
