"""Asks the services of a run what waits; short deadlines, one that does not answer says so.

Promise: every answer or refusal comes within ASK_S; nothing here changes anything.
Does not cover: what is asked and shown (explain.py beside this).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from redis.asyncio import Redis

from muster import rpc
from muster.codec import waiting_from_pb
from muster.errors import MusterError, NotFound, Unavailable
from muster.explained import Answer
from muster.registry import Entry, Registry
from muster.subject import Kind, Subject
from muster.types import Waiting
from muster.v1 import readybank_pb2 as rb
from muster.v1 import router_pb2 as ro
from muster.v1 import trainer_pb2 as tr
from muster.v1.readybank_pb2_grpc import ReadyBankServiceStub
from muster.v1.router_pb2_grpc import RouterServiceStub
from muster.v1.trainer_pb2_grpc import TrainerServiceStub

if TYPE_CHECKING:
    from muster.v1.readybank_pb2_grpc import ReadyBankServiceAsyncStub
    from muster.v1.router_pb2_grpc import RouterServiceAsyncStub
    from muster.v1.trainer_pb2_grpc import TrainerServiceAsyncStub

ASK_S = 3.0


Ask = Callable[[Any], Awaitable[Sequence[Waiting]]]


async def ask(
    redis: Redis, run: str, asked: Subject, group: str, *, within_s: float = ASK_S
) -> dict[str, Answer]:
    """Answers by service: router, readybank, trainer. group: whose bank's view is wanted, or ""."""
    registry = Registry(redis, run)
    subject = "" if asked.kind in (Kind.RUN, Kind.BATCH) else asked.id

    async def router(channel: Any) -> Sequence[Waiting]:
        stub: RouterServiceAsyncStub = RouterServiceStub(channel)
        answer = await stub.Explain(ro.ExplainRequest(subject=subject), timeout=within_s)
        return [waiting_from_pb(line) for line in answer.waiting]

    async def bank(channel: Any) -> Sequence[Waiting]:
        stub: ReadyBankServiceAsyncStub = ReadyBankServiceStub(channel)
        request = rb.ExplainBatchRequest(run=run, group=group)
        answer = await stub.ExplainBatch(request, timeout=within_s)
        return [waiting_from_pb(line) for line in answer.waiting]

    async def trainer(channel: Any) -> Sequence[Waiting]:
        stub: TrainerServiceAsyncStub = TrainerServiceStub(channel)
        answer = await stub.GetTrainerStatus(tr.GetTrainerStatusRequest(), timeout=within_s)
        return [_trainer(answer)]

    kinds: dict[str, Ask] = {"router": router, "readybank": bank, "trainer": trainer}
    async with asyncio.TaskGroup() as tasks:
        asking = {
            kind: tasks.create_task(_one(registry, kind, call, within_s), name=f"ask-{kind}")
            for kind, call in kinds.items()
        }
    return {kind: task.result() for kind, task in asking.items()}


async def _one(registry: Registry, kind: str, call: Ask, within_s: float) -> Answer:
    """The first that answers: of several listed ones, all but one stand by."""
    problem = "none is listed: it is starting, or not running"
    try:
        entries: list[Entry] = await registry.list(kind)
        for entry in reversed(entries):
            try:
                async with asyncio.timeout(within_s), rpc.channel(entry.address) as channel:
                    with rpc.calling(f"asking {entry.id}"):
                        return Answer(kind, tuple(await call(channel)))
            except TimeoutError:
                problem = f"{entry.id} at {entry.address} did not answer within {within_s:g} s"
            except Unavailable as error:
                problem = f"{entry.id} at {entry.address}: {error.problem}"
            except NotFound:  # it is there, and knows nothing of the subject
                return Answer(kind)
    except MusterError as error:
        problem = error.problem
    return Answer(kind, (), problem)


_PHASES = {
    tr.TRAINER_PHASE_STARTING: ("starting", "its checkpoint and the engines"),
    tr.TRAINER_PHASE_WAITING: ("waiting", "the next batch"),
    tr.TRAINER_PHASE_TRAINING: ("training", "its own step"),
    tr.TRAINER_PHASE_SAVING: ("saving", "its checkpoint to be durable"),
    tr.TRAINER_PHASE_PUBLISHING: ("publishing", "the replicas to take the new version"),
}


def _trainer(status: tr.GetTrainerStatusResponse) -> Waiting:
    state, waits_for = _PHASES.get(status.phase, ("stopped", ""))
    missed = [p for p in status.last.publications if p.error]
    if missed:
        waits_for += f"; {missed[0].replica} has not taken version {status.version}"
        waits_for += f" ({missed[0].error})"
    told = f"{state}: {status.step} steps done, version {status.version}"
    if status.phase == tr.TRAINER_PHASE_WAITING:
        return Waiting("trainer", told, waits_for, 0.0, "readybank", "muster explain batch")
    return Waiting("trainer", told, waits_for, 0.0, "trainer", "tail -n 20 logs/trainer.log")
