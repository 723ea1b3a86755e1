"""gRPC in front of the bank: decode, feed, wait, encode. No decisions.

Promise: a call's answer is what the machine decided for that very call; a caller that hangs up is
told to the machine; payloads are read while they are sent, a few siblings at a time.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

from muster import codec, failpoints
from muster.clock import wall
from muster.errors import Fenced, InvalidInput, MusterError, NotFound, Refused
from muster.tasks import end
from muster.v1 import events_pb2 as ev
from muster.v1 import readybank_pb2 as rb
from muster.v1.readybank_pb2_grpc import ReadyBankServiceServicer
from services.readybank import events as e
from services.readybank import explain
from services.readybank.adapters import feed, payloads
from services.readybank.driver import Answer, BankDriver

NAME = "muster.v1.ReadyBankService"
_REASON = re.compile(r"[a-z0-9_]{1,32}")


class ReadyBankServer(ReadyBankServiceServicer):
    """The bank's calls."""

    def __init__(self, driver: BankDriver, tasks: asyncio.TaskGroup):
        self._driver, self._tasks = driver, tasks

    async def RegisterTrainer(
        self, request: rb.RegisterTrainerRequest, context: Any
    ) -> rb.RegisterTrainerResponse:
        self._check(request.run, request.trainer_epoch)
        if request.last_durable_step < 0:
            raise _invalid("last_durable_step", request.last_durable_step, "0 before the first")
        if request.oldest_kept_step < 0:
            raise _invalid("oldest_kept_step", request.oldest_kept_step, "0 while all are kept")
        epoch, step = request.trainer_epoch, request.last_durable_step
        batches, kept = self._batches(request), request.oldest_kept_step
        answer = await self._ask(
            "register", lambda call: e.TrainerRegistered(epoch, step, call, batches, kept)
        )
        assert isinstance(answer, e.AnswerRegistered)
        return rb.RegisterTrainerResponse(
            steps_unseen=answer.steps_unseen, next_step=answer.next_step
        )

    async def LeaseBatch(
        self, request: rb.LeaseBatchRequest, context: Any
    ) -> AsyncIterator[rb.LeaseBatchResponse]:
        self._check(request.run, request.trainer_epoch)
        if request.groups < 1:
            raise _invalid("groups", request.groups, "ask for at least one group")
        if request.step < 1:
            raise _invalid("step", request.step, "steps are counted from 1")
        epoch, step, groups, at = request.trainer_epoch, request.step, request.groups, wall()
        former = request.former_revision if request.HasField("former_revision") else None
        answer = await self._ask(
            "lease", lambda call: e.LeaseAsked(epoch, step, groups, call, at, former)
        )
        assert isinstance(answer, e.SendBatch)
        run = self._driver.streams.run
        header = feed.batch_to_pb(run, answer.batch, ev.BATCH_STAGE_FROZEN)
        await failpoints.at("readybank.send.before")
        yield rb.LeaseBatchResponse(header=header, returns_left=answer.returns_left)
        windows: asyncio.Queue[payloads.Window | MusterError] = asyncio.Queue(1)
        reading = self._tasks.create_task(
            payloads.read(self._driver.streams, answer.groups, windows), name="read-batch"
        )
        try:
            while True:
                window = await windows.get()  # Redis is read ahead of what is sent
                if isinstance(window, MusterError):
                    raise window
                for part in payloads.parts(run, window):
                    yield part
                if not window[0]:
                    break
        finally:
            await end(reading)
        await failpoints.at("readybank.send.after")

    async def AcknowledgeBatch(
        self, request: rb.AcknowledgeBatchRequest, context: Any
    ) -> rb.AcknowledgeBatchResponse:
        self._check(request.run, request.trainer_epoch)
        epoch, step, kept = request.trainer_epoch, request.step, request.oldest_kept_step
        if step < 1:
            raise _invalid("step", step, "steps are counted from 1")
        if not 0 <= kept <= step:  # what lies below it is deleted
            wanted = f"the step of the oldest checkpoint that is kept, {step} at most; 0: all are"
            raise _invalid("oldest_kept_step", kept, wanted)
        revision = request.revision if request.HasField("revision") else None
        answer = await self._ask(
            "acknowledge", lambda call: e.AckAsked(epoch, step, call, kept, revision)
        )
        assert isinstance(answer, e.AnswerAcknowledged)
        return rb.AcknowledgeBatchResponse(groups_trained=answer.groups_trained)

    async def ReturnGroups(
        self, request: rb.ReturnGroupsRequest, context: Any
    ) -> rb.ReturnGroupsResponse:
        self._check(request.run, request.trainer_epoch)
        if request.step < 1:
            raise _invalid("step", request.step, "steps are counted from 1")
        if not request.groups:
            raise _invalid("groups", "", "name at least one group")
        epoch, step, groups = (
            request.trainer_epoch,
            request.step,
            tuple(map(_given, request.groups)),
        )
        answer = await self._ask("return", lambda call: e.ReturnAsked(epoch, step, groups, call))
        assert isinstance(answer, e.AnswerReturned)
        return rb.ReturnGroupsResponse(returned=answer.returned)

    async def ExplainBatch(
        self, request: rb.ExplainBatchRequest, context: Any
    ) -> rb.ExplainBatchResponse:
        self._check_run(request.run)
        await self._driver.in_charge()
        machine = self._driver.machine
        if not request.group:
            lines, groups = explain.batch(machine)
            told = [codec.waiting_to_pb(line) for line in lines]
            return rb.ExplainBatchResponse(waiting=told, open_groups=groups)
        found = explain.group(machine, request.group)
        if found is None:
            raise NotFound(
                "the bank has no entry of this group",
                field="group",
                value=request.group,
                way_out="see the open groups with `muster explain`",
            )
        return rb.ExplainBatchResponse(waiting=[codec.waiting_to_pb(line) for line in found])

    def _batches(self, request: rb.RegisterTrainerRequest) -> tuple[e.Batch, ...]:
        last = request.last_durable_step
        first = last + 1 - len(request.batches)
        for step, record in enumerate(request.batches, first):
            if (record.run, record.step) != (request.run, step) or step < 1 or not record.members:
                wanted = f"send whole batches of run {request.run} up to step {last}, or none"
                raise _invalid("batches", f"{record.run}/{record.step}", wanted)
        return tuple(feed.batch_from_pb(record) for record in request.batches)

    def _check(self, run: str, epoch: int) -> None:
        self._check_run(run)
        if epoch < 1:
            raise _invalid("trainer_epoch", epoch, "take the next trainer epoch of the run first")

    def _check_run(self, run: str) -> None:
        if run != self._driver.streams.run:
            raise _invalid("run", run, f"this bank serves run {self._driver.streams.run}")

    async def _ask(self, kind: str, event: Callable[[str], e.BankEvent]) -> Answer:
        call, answer = self._driver.calls.open(kind)
        try:
            await self._driver.feed(event(call))
            found = await answer
            await self._driver.in_charge()  # a bank that slept may know less than is true
        except asyncio.CancelledError:
            await self._driver.feed(e.LeaseGone(call))
            raise
        finally:
            self._driver.calls.close(call)
        if isinstance(found, e.RefuseCall):
            kind_of = Fenced if found.fenced else Refused
            raise kind_of(
                found.problem, field=found.field, value=found.value, way_out=found.way_out
            )
        return found


def _given(found: rb.ReturnedGroup) -> e.GivenBack:
    if not _REASON.fullmatch(found.reason):
        raise _invalid("groups.reason", found.reason, "a word of at most 32 of a-z, 0-9 and _")
    measured = found.measured_kl if found.HasField("measured_kl") else None
    if measured is not None and not math.isfinite(measured):
        raise _invalid("groups.measured_kl", measured, "a finite number, or leave it out")
    return e.GivenBack(found.group, found.reason, measured)


def _invalid(field: str, value: object, way_out: str) -> InvalidInput:
    return InvalidInput("not usable here", field=field, value=value, way_out=way_out)
