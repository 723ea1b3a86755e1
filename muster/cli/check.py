"""`muster tasks check`: can each task be run, and does it reward its solution, and only that?

Reads every task and tells all that is refused in it and what is accepted without effect
(check_plan.py). Then starts the sandbox service alone, and tries every task up to three times in a
fresh box: doing nothing must give 0, the wrong solution 0, the right one 1; a task with parameters
so for each of several seeds. The scripts are read here and sent as one command: no box ever holds a
solution. A task whose box cannot be made is refused once, not tried three times.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from muster import box_offer, codec, rpc
from muster.clean import clean
from muster.cli import check_told
from muster.cli.check_plan import Note, Plan, Try, plan, refusal
from muster.cli.check_told import OUTPUT_CHARACTERS, Tried, show, tail
from muster.cli.screen import Screen, screen
from muster.cli.settings import read_config
from muster.cli.up import finish, run_services
from muster.config import Config
from muster.errors import InvalidInput, MusterError, Unavailable
from muster.registry import Registry
from muster.streams import connect
from muster.supervisor import Work
from muster.taskset import Task
from muster.types import EpisodeKey, Limits, StepLimit, Value, VerdictStatus
from muster.v1 import common_pb2 as common
from muster.v1 import sandbox_pb2 as pb
from muster.v1.sandbox_pb2_grpc import SandboxServiceStub

if TYPE_CHECKING:
    from muster.v1.sandbox_pb2_grpc import SandboxServiceAsyncStub

AT_ONCE = 2  # tries that run side by side
_STEP_S = 60.0  # or what the task allows its agent, when that is less
_CALL_S = 120.0
# No limits of our own: a box gets what the task asks for, as in production.
_NOTHING_ASKED = Limits(0, 0, 0, 0, 0)


class _Judged(Value, frozen=True):
    """The verdict, how the script ended and what it printed."""

    verdict: pb.VerifyResponse
    script: str = ""
    said: str = ""


class _Refused(Exception):
    """The box of a task cannot be made, by its author's doing."""

    def __init__(self, error: InvalidInput):
        super().__init__(str(error))
        self.error = error


def check(
    path: Path, *, seeds: int = 1, config_path: Path | None, as_json: bool, verbose: bool = False
) -> int:
    """0 when every try got the reward it must get; 1 when one did not or a task is refused."""
    config = read_config(config_path)
    planned = plan(path, seeds)
    if not planned.work:
        return show([], planned, as_json)
    judge = _Judge(planned)
    # A state folder of its own: a check may run beside `muster up`.
    aside = config.model_copy(update={"state_dir": config.state_dir / "check"})
    with screen(as_json) as shown:

        def work_of(resolved: Config) -> Work:
            async def work() -> None:
                await judge.judge(resolved, shown)

            return work

        ended = run_services(aside, shown, work_of, only=("sandbox",))
    if ended.line or ended.interrupted:
        return finish(ended, interrupted_status=130)
    found = Plan(planned.work, tuple(judge.refused), tuple(judge.remarks))
    return show(judge.results, found, as_json, verbose)


class _Judge:
    """Tries the tasks of a plan; collects results, and what the host says against tasks."""

    def __init__(self, planned: Plan):
        self._work = planned.work
        self.refused, self.remarks = list(planned.refused), list(planned.remarks)
        self.results: list[Tried] = []
        self._unstartable: set[str] = set()  # tasks

    async def judge(self, config: Config, shown: Screen) -> None:
        """Try them all on this machine's host; what it cannot make a box for is refused."""
        async with connect(config.redis) as redis:
            hosts = await Registry(redis, config.run).list("sandbox")
        if not hosts:
            raise Unavailable("the sandbox is no longer listed", way_out="see logs/sandbox.log")
        self._ask_of(hosts[-1].info)
        found: list[Tried | None] = [None] * len(self._work)
        turn = asyncio.Semaphore(AT_ONCE)
        async with rpc.channel(hosts[-1].address) as channel, asyncio.TaskGroup() as tasks:
            stub: SandboxServiceAsyncStub = SandboxServiceStub(channel)

            async def one(index: int, task: Task, attempt: Try) -> None:
                async with turn:
                    if task.name in self._unstartable:
                        return
                    key = EpisodeKey(config.run, f"check-{index:05d}", 0, 0, 1)
                    try:
                        found[index] = tried = await _try(stub, key, task, attempt)
                    except _Refused as why:
                        self._refuse(task.name, why.error)
                        return
                    shown.line(clean(check_told.line(tried)))

            for index, (task, attempt) in enumerate(self._work):
                tasks.create_task(one(index, task, attempt), name=f"{task.name}/{attempt.way}")
        self.results = [
            one for one in found if one is not None and one.task not in self._unstartable
        ]

    def _ask_of(self, info: Mapping[str, str]) -> None:
        """What the host can be known to refuse, or to cut, before a box is asked for."""
        offer = box_offer.read(info)
        most = float(info.get("verify_timeout_s_max", "inf"))
        for task in {task.name: task for task, _ in self._work}.values():
            try:
                offer.check(task, _NOTHING_ASKED)
            except InvalidInput as error:
                self._refuse(task.name, error)
            if task.verifier_timeout_s > most:
                told = (
                    f"{task.verifier_timeout_s:g} s is more than the host's "
                    f"sandbox.verify_timeout_s_max: the verifier gets {most:g} s"
                )
                self.remarks.append(Note(task.name, _timeout_field(task), told))

    def _refuse(self, task: str, error: InvalidInput) -> None:
        if task not in self._unstartable:
            self._unstartable.add(task)
            self.refused.append(refusal(task, error))


def _timeout_field(task: Task) -> str:
    return "max_test_timeout_sec" if task.verdict == "pytest" else "verifier.timeout_sec"


async def _try(stub: SandboxServiceAsyncStub, key: EpisodeKey, task: Task, attempt: Try) -> Tried:
    try:
        with rpc.calling(f"{task.name}/{attempt.way}"):
            judged = await _in_box(stub, key, task, attempt)
    except MusterError as error:
        return Tried(task.name, attempt.way, attempt.wanted, None, str(error))
    return judgement(task, attempt, judged.verdict, judged.script, judged.said)


def judgement(
    task: Task, attempt: Try, verdict: pb.VerifyResponse, script: str, said: str
) -> Tried:
    """What a verdict means for a try. script, said: how its script ended, and what it printed."""
    status = codec.verdict_from_pb(verdict.status)
    reward = verdict.reward if status is VerdictStatus.REWARDED else None
    if reward == attempt.wanted:
        return Tried(task.name, attempt.way, attempt.wanted, reward, "")
    output = verdict.output_tail.decode("utf-8", "replace")
    detail = f"no verdict ({status}): {verdict.detail}"
    if reward is not None:
        ended = f", and ended with {verdict.exit_code}" if verdict.exit_code else ""
        detail = f"the verifier gave {reward:g}{ended}"
    elif status is VerdictStatus.TIMEOUT:
        detail += f"; {_timeout_field(task)} is its limit"
    return Tried(
        task.name,
        attempt.way,
        attempt.wanted,
        reward,
        " ".join(detail.split()),
        tail(output, OUTPUT_CHARACTERS),
        script,
        tail(said, OUTPUT_CHARACTERS),
        check_told.hint(str(status), f"{verdict.detail}\n{output}\n{said}"),
    )


async def _acquire(stub: SandboxServiceAsyncStub, episode: common.EpisodeKey, task: Task) -> str:
    package = common.TaskPackage(name=task.name, digest=task.digest, archive=task.archive)
    asking = pb.AcquireBoxRequest(episode=episode, task=package, limits=pb.BoxLimits())
    try:
        with rpc.calling("AcquireBox"):
            return (await stub.AcquireBox(asking, timeout=_CALL_S)).box
    except InvalidInput as error:
        raise _Refused(error) from error


async def _in_box(
    stub: SandboxServiceAsyncStub, key: EpisodeKey, task: Task, attempt: Try
) -> _Judged:
    episode = codec.key_to_pb(key)
    box = await _acquire(stub, episode, task)
    script, said = "", b""
    try:
        if attempt.script:
            command = _command(attempt)
            step_s = min(_STEP_S, task.agent_timeout_s or _STEP_S)
            step = pb.ExecRequest(
                episode=episode, box=box, turn=0, command=command, timeout_s=step_s
            )
            answer = await stub.Exec(step, timeout=step_s + _CALL_S)
            script = _ended(answer, step_s)
            said = answer.output_head + answer.output_tail
        verify = pb.VerifyRequest(episode=episode, box=box)
        verdict = await stub.Verify(verify, timeout=task.verifier_timeout_s + _CALL_S)
        return _Judged(verdict, script, said.decode("utf-8", "replace"))
    finally:
        release = pb.ReleaseBoxRequest(episode=episode, box=box)
        await stub.ReleaseBox(release, timeout=_CALL_S)


def _ended(answer: pb.ExecResponse, step_s: float) -> str:
    limit = codec.limit_from_pb(answer.limit)
    if limit is StepLimit.NONE:
        return f"ended with {answer.exit_code}"
    within = f" ({step_s:g} s)" if limit is StepLimit.TIME else ""
    return f"was ended by its {limit} limit{within}"


def _command(attempt: Try) -> str:
    settings = [shlex.quote(f"{name}={value}") for name, value in attempt.env]
    return " ".join(
        [*(["env", *settings] if settings else []), "bash -c", shlex.quote(attempt.script)]
    )
