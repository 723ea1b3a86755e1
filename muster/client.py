"""The client: submit task sets, follow them, cancel them. Needs the base install only.

    async with MusterClient("127.0.0.1:7400") as client:
        job = await client.submit("tasks/", groups=4, group_size=4)
        async for progress in client.watch(job):
            print(progress)

Promise: no protobuf at the surface; a submission is sent under a name chosen here, so sending it
again after a lost answer has the effect of one; every call goes on through a restart of the router
and through the take-over by another, as long as that is found: of several addresses the next is
tried, and `find` is asked where the router is now.
Raises the exceptions of muster.errors. Does not cover: reading results (muster.report).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import grpc

from muster import evaluated_codec, rpc
from muster.clock import monotonic
from muster.codec import policy_to_pb, purpose_from_pb, purpose_to_pb, sampling_to_pb
from muster.errors import Fenced, Unavailable
from muster.evaluation import EvaluationResult
from muster.evaluation_codec import asked_from_pb, serving_from_pb, training_from_pb
from muster.evaluation_doubts import result
from muster.taskset import Task, count_tasks, read_instances, read_task_set
from muster.types import JobPolicy, Purpose, SamplingParams, Value
from muster.v1 import common_pb2 as common
from muster.v1 import events_pb2 as ev
from muster.v1 import router_pb2 as pb
from muster.v1.router_pb2_grpc import RouterServiceStub
from muster.wanted import check_policy, check_sampling, check_sizes

if TYPE_CHECKING:
    from muster.v1.router_pb2_grpc import RouterServiceAsyncStub

A = TypeVar("A")

DEFAULT_ROUTER = "127.0.0.1:7400"
_CALL_S = 30.0
# One stream's deadline: a watch opens the next one, and so finds out within this time that the
# router it listens to hangs, while another has taken over.
_WATCH_S = 15.0
_RETRY_S = 0.5


class JobState(StrEnum):
    """Where a job stands."""

    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"


class Progress(Value, frozen=True):
    """A job at one moment; counts are of this job only."""

    job: str
    state: JobState
    groups_total: int
    groups_opened: int
    groups_complete: int
    groups_trained: int
    groups_filtered: int
    episodes_running: int
    episodes_finished: int
    turns: int
    repairs: int
    outcomes: dict[str, int]
    policy_version: int
    waiting_for: str
    groups_evaluated: int = 0
    purpose: Purpose = Purpose.TRAIN

    @property
    def ended(self) -> bool:
        """True when nothing will change any more."""
        return self.state is not JobState.RUNNING


class MusterClient:
    """A connection to a router. `patience_s`: how long it may be away before calls give up.

    `address`: of one or, with commas, of several routers of the same run; without it, what `find`
    says, else 127.0.0.1:7400. `find`: answers where the router is now, "" when it does not know.
    `tell` gets a line for people when the router is waited for. InvalidInput for an address that
    is neither host:port nor unix:PATH.
    """

    def __init__(
        self,
        address: str = "",
        *,
        patience_s: float = 60.0,
        find: Callable[[], str] | None = None,
        tell: Callable[[str], None] | None = None,
    ):
        self._addresses = [one.strip() for one in (address or DEFAULT_ROUTER).split(",")]
        self._named = bool(address)
        for one in self._addresses:
            rpc.check_address(one, field="router")
        self._address, self._patience_s = self._addresses[0], patience_s
        self._find = find or (lambda: "")
        self._tell = tell or (lambda line: None)
        self._told = False

    async def __aenter__(self) -> Self:
        found = self._find()
        if found and not self._named:
            self._addresses = [found]  # whoever listens at the usual place is another run's
        self._open(found or self._address)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._channel.close()

    def _open(self, address: str) -> None:
        self._address = address
        self._channel = rpc.open_channel(address)
        self._stub: RouterServiceAsyncStub = RouterServiceStub(self._channel)

    async def submit(
        self,
        path: str | Path | Sequence[Path],
        *,
        groups: int,
        group_size: int,
        sampling: SamplingParams | None = None,
        job: str = "",
        split: str = "train",
        instances: int | None = None,
        policy: JobPolicy | None = None,
        purpose: Purpose = Purpose.TRAIN,
    ) -> str:
        """Submit the task folder, or folder of tasks, at `path`; the name of the new job.

        A sequence of folders is taken in its order.

        groups: to collect in all, tasks taken in turn; group_size: siblings in each, 2 or more.
        split: only tasks of that one; "all" takes every task. instances: a seed from which each
        group of a task with parameters gets an instance of its own; without it all get the first.
        policy: what to do with siblings and groups that are not whole; None: as configured.
        purpose: EVALUATE runs the groups and counts them, and no trainer ever gets them; their
        instances are held out (`evaluate` does all of it).
        """
        check_sizes(groups, group_size, purpose)
        check_sampling(sampling or SamplingParams(), purpose=purpose)
        check_policy(policy or JobPolicy(), group_size=group_size)
        folders = [Path(path)] if isinstance(path, str | Path) else list(path)
        held_out = purpose is Purpose.EVALUATE
        tasks = await asyncio.to_thread(_tasks, folders, split, instances, groups, held_out)
        request = pb.SubmitTaskSetRequest(
            job=job or f"job-{uuid.uuid4().hex[:8]}",
            tasks=[
                common.TaskPackage(name=task.name, digest=task.digest, archive=task.archive)
                for task in tasks
            ],
            groups=groups,
            group_size=group_size,
            sampling=sampling_to_pb(sampling or SamplingParams()),
            policy=policy_to_pb(policy or JobPolicy()),
            purpose=purpose_to_pb(purpose),
        )
        answer = await self._call(
            "submitting to", lambda: self._stub.SubmitTaskSet(request, timeout=_CALL_S)
        )
        return answer.job

    async def evaluate(
        self,
        path: str | Path | Sequence[Path],
        *,
        samples: int = 16,
        split: str = "eval",
        sampling: SamplingParams | None = None,
        rounds: int = 1,
        instances: int = 0,
        job: str = "",
        show: Callable[[Progress], None] | None = None,
    ) -> EvaluationResult:
        """Evaluate the policy on each task of the split and wait for the result.

        samples: of each task; nothing of them is trained on. sampling: None samples as the policy
        does, at temperature 1; top_k 1 is greedy. Tasks with parameters are held-out instances of
        the seeds `instances`, `instances` + 1 …, one in each of `rounds` rounds: training never
        draws those. show: hears of progress. See `evaluation` for what is answered.
        """
        folders = [Path(path)] if isinstance(path, str | Path) else list(path)
        count = await asyncio.to_thread(count_tasks, folders, split)
        job = await self.submit(
            folders,
            groups=count * rounds,
            group_size=samples,
            sampling=sampling,
            job=job,
            split=split,
            instances=instances,
            purpose=Purpose.EVALUATE,
        )
        async for progress in self.watch(job):
            if show:
                show(progress)
        return await self.evaluation(job)

    async def evaluation(self, job: str) -> EvaluationResult:
        """What an evaluation has come to so far; `complete` says whether that is all of it.

        NotFound when the router does not know the job, InvalidInput when it is for a trainer.
        """
        request = pb.GetEvaluationRequest(job=job)
        header, groups = await self._call("asking", lambda: self._evaluation(request))
        return result(
            asked_from_pb(header),
            [evaluated_codec.from_pb(group) for group in groups],
            serving_from_pb(header),
            training_from_pb(header),
        )

    async def _evaluation(
        self, request: pb.GetEvaluationRequest
    ) -> tuple[pb.EvaluationHeader, list[ev.EvaluatedGroup]]:
        call = self._stub.GetEvaluation(request, timeout=_CALL_S)
        try:
            parts = [part async for part in call]
        finally:
            call.cancel()
        if not parts:
            raise Unavailable("the router ended the answer before its beginning")
        return parts[0].header, [part.group for part in parts[1:]]

    async def get(self, job: str) -> Progress:
        """The job as it stands now; NotFound when the router does not know it."""
        request = pb.GetJobRequest(job=job)
        answer = await self._call("asking", lambda: self._stub.GetJob(request, timeout=_CALL_S))
        return _progress(answer.progress)

    async def cancel(self, job: str) -> Progress:
        """Stop the job's episodes and give up its open groups."""
        request = pb.CancelJobRequest(job=job)
        answer = await self._call(
            "cancelling at", lambda: self._stub.CancelJob(request, timeout=_CALL_S)
        )
        return _progress(answer.progress)

    async def watch(self, job: str) -> AsyncIterator[Progress]:
        """The present state at once, then every change until the job has ended.

        Raises Unavailable when the router stays away for `patience_s`.
        """
        last: Progress | None = None
        deadline: float | None = None  # while the router is away
        while True:
            at = self._address
            try:
                async for progress in self._watch_once(job):
                    deadline = None
                    if progress != last:
                        yield progress
                    last = progress
                    if progress.ended:
                        return
                await self._move(self._find())
            except (Unavailable, Fenced) as error:
                deadline = deadline or monotonic() + self._patience_s
                await self._again(error, deadline, at)

    async def _watch_once(self, job: str) -> AsyncIterator[Progress]:
        """Ends when a stream that spoke has lasted its time."""
        call = self._stub.WatchJob(pb.WatchJobRequest(job=job), timeout=_WATCH_S)
        spoke = False
        try:
            # Another call of this client may close the channel, when it goes to another router.
            with rpc.calling(f"watching at {self._address}"):
                async for message in call:
                    spoke = True
                    yield _progress(message.progress)
        except Unavailable as error:
            cause = error.__cause__
            timed_out = grpc.StatusCode.DEADLINE_EXCEEDED
            if spoke and isinstance(cause, grpc.aio.AioRpcError) and cause.code() is timed_out:
                return
            raise
        finally:
            call.cancel()
        raise Unavailable("the router ended the watch before the job had ended")

    async def _call(self, what: str, start: Callable[[], Awaitable[A]]) -> A:
        """The answer, however often the router has to be asked; `start` makes one call."""
        deadline = monotonic() + self._patience_s
        while True:
            at = self._address
            try:
                with rpc.calling(f"{what} {at}"):
                    return await start()
            except (Unavailable, Fenced) as error:  # Fenced: it was the router, and is not now
                await self._again(error, deadline, at)

    async def _again(self, error: Unavailable | Fenced, deadline: float, at: str) -> None:
        """Wait before the next try, or say that it is no use. `at`: where this one failed."""
        if monotonic() >= deadline:
            raise Unavailable(
                f"the router did not answer for {self._patience_s:.0f} s ({error.problem})",
                field="router",
                value=",".join(self._addresses),
                way_out="start it with `muster up`, or name another address with --router",
            ) from error
        if not self._told:
            self._tell(
                f"waiting for the router at {self._address} (at most {self._patience_s:.0f} s)"
            )
        self._told = True
        await asyncio.sleep(_RETRY_S)
        if at == self._address:  # else another call of this client has gone on to the next
            await self._move(self._next())

    def _next(self) -> str:
        """Where to try after the present address has failed."""
        if (found := self._find()) not in ("", self._address):
            return found
        known = self._addresses
        place = known.index(self._address) + 1 if self._address in known else 0
        return known[place % len(known)]

    async def _move(self, address: str) -> None:
        """Go on at `address`; "" stays."""
        if address and address != self._address:
            former = self._channel
            self._open(address)
            await former.close()


def _progress(message: pb.JobProgress) -> Progress:
    names = {
        pb.JOB_STATE_RUNNING: JobState.RUNNING,
        pb.JOB_STATE_DONE: JobState.DONE,
        pb.JOB_STATE_CANCELLED: JobState.CANCELLED,
    }
    return Progress(
        job=message.job,
        state=names[message.state],
        groups_total=message.groups_total,
        groups_opened=message.groups_opened,
        groups_complete=message.groups_complete,
        groups_trained=message.groups_trained,
        groups_filtered=message.groups_filtered,
        episodes_running=message.episodes_running,
        episodes_finished=message.episodes_finished,
        turns=message.turns,
        repairs=message.repairs,
        outcomes=dict(sorted(message.outcomes.items())),
        policy_version=message.policy_version,
        waiting_for=message.waiting_for,
        groups_evaluated=message.groups_evaluated,
        purpose=purpose_from_pb(message.purpose),
    )


def _tasks(
    folders: list[Path], split: str, instances: int | None, groups: int, held_out: bool
) -> list[Task]:
    if held_out:
        seed = instances or 0
        return read_instances(folders, seed=seed, groups=groups, split=split, held_out=True)
    if instances is not None:
        return read_instances(folders, seed=instances, groups=groups, split=split)
    return [task for folder in folders for task in read_task_set(folder, split=split)]
