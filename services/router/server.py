"""RouterService over gRPC: check, decode, hand over, encode.

Owns: the checks of what clients send. Promise: bad input is refused whole, naming field, value
and way out, before anything is written. Does not cover: decisions.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator
from typing import Any

from muster import codec
from muster.errors import InvalidInput
from muster.taskset import Task, task_from_archive
from muster.types import Purpose
from muster.v1 import router_pb2 as pb
from muster.v1 import router_pb2_grpc
from muster.wanted import check_policy, check_sampling, check_sizes
from services.router.adapters.evaluations import STATES
from services.router.config import RouterConfig
from services.router.driver import RouterDriver, ended
from services.router.jobs import JobProgress


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """The front door."""

    def __init__(
        self,
        driver: RouterDriver,
        run: str,
        stopping: asyncio.Event,
        section: RouterConfig,
    ):
        self._driver, self._run, self._stopping = driver, run, stopping
        self._groups_max, self._tokens_max = section.groups_max, section.episode_tokens_max

    async def SubmitTaskSet(
        self, request: pb.SubmitTaskSetRequest, context: Any
    ) -> pb.SubmitTaskSetResponse:
        sampling, purpose = codec.sampling_from_pb(request.sampling), _purpose(request.purpose)
        check_sampling(sampling, self._tokens_max, purpose)
        check_sizes(request.groups, request.group_size, purpose)
        if request.groups > self._groups_max:
            raise InvalidInput(
                "too many groups in one job",
                field="groups",
                value=request.groups,
                way_out=f"split it: router.groups_max is {self._groups_max}",
            )
        job = request.job or f"job-{secrets.token_hex(4)}"
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", job):
            raise InvalidInput(
                "not a job id",
                field="job",
                value=job,
                way_out="letters, digits, - and _, at most 63",
            )
        tasks = _tasks(request)
        policy = codec.policy_from_pb(request.policy)
        check_policy(policy, group_size=request.group_size)
        sizes = (request.groups, request.group_size)
        await self._driver.submit(job, tasks, *sizes, sampling, policy, purpose)
        return pb.SubmitTaskSetResponse(job=job, run=self._run)

    async def GetJob(self, request: pb.GetJobRequest, context: Any) -> pb.GetJobResponse:
        return pb.GetJobResponse(progress=_progress(self._driver.progress(request.job)))

    async def WatchJob(
        self, request: pb.WatchJobRequest, context: Any
    ) -> AsyncIterator[pb.WatchJobResponse]:
        changed = await self._driver.watch(request.job)
        last: JobProgress | None = None
        try:
            while not self._stopping.is_set():
                await changed.wait()
                changed.clear()
                now = self._driver.progress(request.job)
                if now != last:
                    yield pb.WatchJobResponse(progress=_progress(now))
                    last = now
                if ended(now):
                    return
        finally:
            self._driver.unwatch(changed)

    async def CancelJob(self, request: pb.CancelJobRequest, context: Any) -> pb.CancelJobResponse:
        return pb.CancelJobResponse(progress=_progress(await self._driver.cancel(request.job)))

    async def GetEvaluation(
        self, request: pb.GetEvaluationRequest, context: Any
    ) -> AsyncIterator[pb.GetEvaluationResponse]:
        header, groups = await self._driver.evaluation(request.job)
        yield pb.GetEvaluationResponse(header=header)
        for group in groups:
            yield pb.GetEvaluationResponse(group=group)

    async def Explain(self, request: pb.ExplainRequest, context: Any) -> pb.ExplainResponse:
        found = self._driver.explain(request.subject)
        return pb.ExplainResponse(waiting=[codec.waiting_to_pb(line) for line in found])


def _purpose(value: int) -> Purpose:
    try:
        return codec.purpose_from_pb(value)
    except InvalidInput as error:
        way_out = "JOB_PURPOSE_TRAIN or JOB_PURPOSE_EVALUATE"
        raise InvalidInput(
            "not a purpose", field="purpose", value=value, way_out=way_out
        ) from error


def _tasks(request: pb.SubmitTaskSetRequest) -> list[Task]:
    if not request.tasks:
        raise InvalidInput(
            "a task set without tasks", field="tasks", way_out="send at least one task folder"
        )
    tasks = []
    for package in request.tasks:
        task = task_from_archive(package.archive, name=package.name)
        if task.digest != package.digest:
            raise InvalidInput(
                "the archive is not the one that its digest names",
                field=f"tasks[{package.name}].digest",
                value=package.digest,
                way_out="send sha256(archive) in hexadecimal",
            )
        tasks.append(task)
    return tasks


def _progress(progress: JobProgress) -> pb.JobProgress:
    return pb.JobProgress(
        job=progress.job,
        state=STATES[progress.state],
        groups_total=progress.groups_total,
        groups_opened=progress.groups_opened,
        groups_complete=progress.groups_complete,
        groups_trained=progress.groups_trained,
        groups_filtered=progress.groups_filtered,
        episodes_running=progress.episodes_running,
        episodes_finished=progress.episodes_finished,
        turns=progress.turns,
        repairs=progress.repairs,
        outcomes=progress.outcomes,
        policy_version=progress.policy_version,
        waiting_for=progress.waiting_for,
        groups_evaluated=progress.groups_evaluated,
        purpose=codec.purpose_to_pb(progress.purpose),
    )
