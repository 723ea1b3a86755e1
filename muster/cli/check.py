"""`muster tasks check`: can each task be run, and does it reward its solution, and only that?

Reads every task and tells all that is refused in it and what is accepted without effect. Then
starts the sandbox service alone, and tries every task up to three times in a fresh box: doing
nothing must give 0, the wrong solution 0, the right one 1; a task with parameters so for each of
several seeds. The scripts are read here and sent as one command: no box ever holds a solution.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from muster import codec, rpc
from muster.clean import clean
from muster.cli.screen import Screen, emit, screen
from muster.cli.settings import read_config
from muster.cli.up import finish, run_services
from muster.config import Config
from muster.dockerfile import SUPPORTED
from muster.errors import InvalidInput, MusterError, Unavailable
from muster.registry import Registry
from muster.streams import connect
from muster.supervisor import Work
from muster.task_yaml import solution_script
from muster.taskset import (
    Task,
    examine,
    fill,
    read_task,
    solution_env,
    task_folders,
)
from muster.types import EpisodeKey, Value, VerdictStatus
from muster.v1 import common_pb2 as common
from muster.v1 import sandbox_pb2 as pb
from muster.v1.sandbox_pb2_grpc import SandboxServiceStub

if TYPE_CHECKING:
    from muster.v1.sandbox_pb2_grpc import SandboxServiceAsyncStub

AT_ONCE = 2  # tries that run side by side
SCRIPT_BYTES_MAX = 32 << 10
_STEP_S = 60.0  # or what the task allows its agent, when that is less
_CALL_S = 120.0
_DETAIL_CHARACTERS = 300
_WAYS = ("nothing", "wrong", "solve")
# Where each format keeps its solutions; the first that is there counts.
_SOLVE = ("solution/solve.sh", "solution.sh", "solution.yaml")
_WRONG = ("solution/wrong.sh", "wrong.sh")


class Try(Value, frozen=True):
    """One way to attempt a task and the reward it must get."""

    way: str  # one of _WAYS
    script: str
    wanted: float
    env: tuple[tuple[str, str], ...] = ()


class Tried(Value, frozen=True):
    """What came of it; `reward` is None when there was no verdict."""

    task: str
    way: str
    wanted: float
    reward: float | None
    detail: str

    @property
    def right(self) -> bool:
        return self.reward == self.wanted


class Note(Value, frozen=True):
    """Something to say of a task: a refusal, with its way out, or a remark."""

    task: str
    field: str
    text: str
    way_out: str = ""


class Plan(Value, frozen=True):
    """What there is to try, and what the reading found."""

    work: tuple[tuple[Task, Try], ...]
    refused: tuple[Note, ...]
    remarks: tuple[Note, ...]


def check(path: Path, *, seeds: int = 1, config_path: Path | None, as_json: bool) -> int:
    """0 when every try got the reward it must get; 1 when one did not or a task is refused."""
    config = read_config(config_path)
    planned = plan(path, seeds)
    if not planned.work:
        return show([], planned, as_json)
    results: list[Tried] = []
    refused = list(planned.refused)
    # A state folder of its own: a check may run beside `muster up`.
    aside = config.model_copy(update={"state_dir": config.state_dir / "check"})
    with screen(as_json) as shown:

        def work_of(resolved: Config) -> Work:
            async def judge() -> None:
                results.extend(await _judge(resolved, planned.work, refused, shown))

            return judge

        ended = run_services(aside, shown, work_of, only=("sandbox",))
    if ended.line or ended.interrupted:
        return finish(ended, interrupted_status=130)
    return show(results, Plan(planned.work, tuple(refused), planned.remarks), as_json)


def plan(path: Path, seeds: int) -> Plan:
    """Every task at `path`; one with parameters under so many seeds, from its split's first.

    Raises InvalidInput when there is no task at all.
    """
    work: list[tuple[Task, Try]] = []
    refused: list[Note] = []
    remarks: list[Note] = []
    for folder in task_folders(path):
        try:
            read = examine(folder)
            remarks += [Note(folder.name, said.field, said.text) for said in read.remarks]
            refused += [_refusal(folder.name, error) for error in read.refusals]
            if read.task is None:
                continue
            work += _work(folder, read.task, seeds)
            if _first(folder, _WRONG) is None:
                missing = "there is none: what only looks right is not tried"
                remarks.append(Note(folder.name, "wrong.sh", missing))
        except InvalidInput as error:
            refused.append(_refusal(folder.name, error))
    return Plan(tuple(work), tuple(refused), tuple(remarks))


def tries(folder: Path, seed: int | None = None) -> tuple[Try, ...]:
    """The tries of the task in `folder`; InvalidInput when there is no solution."""
    solve, wrong = _first(folder, _SOLVE), _first(folder, _WRONG)
    if solve is None:
        raise InvalidInput(
            "the check needs a solution",
            field="task",
            value=folder.name,
            way_out=f"add one of {', '.join(_SOLVE)}, which solves the task, and one of "
            f"{', '.join(_WRONG)}, which looks right and is not",
        )
    env = tuple(sorted(solution_env(folder).items()))
    found = [Try("nothing", "", 0.0)]
    if wrong is not None:
        found.append(Try("wrong", _script(folder, wrong, seed), 0.0, env))
    return (*found, Try("solve", _script(folder, solve, seed), 1.0, env))


def _work(folder: Path, task: Task, seeds: int) -> list[tuple[Task, Try]]:
    first = task.name.partition("@")[2]
    if not first:
        return [(task, attempt) for attempt in tries(folder)]
    return [
        (read_task(folder, seed=seed), attempt)
        for seed in range(int(first), int(first) + seeds)
        for attempt in tries(folder, seed)
    ]


def _first(folder: Path, names: Sequence[str]) -> str | None:
    return next((name for name in names if (folder / name).is_file()), None)


def _refusal(task: str, error: MusterError) -> Note:
    return Note(task, error.field, error.problem, error.way_out)


def _script(folder: Path, name: str, seed: int | None) -> str:
    text = fill(folder, name, seed)
    if name.endswith(".yaml"):
        text = solution_script(text)
    if len(text.encode()) > SCRIPT_BYTES_MAX:
        problem, way_out = f"over {SCRIPT_BYTES_MAX} bytes", "make it shorter"
        raise InvalidInput(problem, field="task", value=folder / name, way_out=way_out)
    return text


async def _judge(
    config: Config, work: Sequence[tuple[Task, Try]], refused: list[Note], shown: Screen
) -> list[Tried]:
    """Try them all on this machine's host; what it cannot build is added to `refused`."""
    async with connect(config.redis) as redis:
        hosts = await Registry(redis, config.run).list("sandbox")
    if not hosts:
        raise Unavailable("the sandbox is no longer listed", way_out="see logs/sandbox.log")
    if not hosts[-1].info.get("builds"):
        refused += _unbuildable(work)
        work = [(task, attempt) for task, attempt in work if not task.unbuildable]
    results: list[Tried | None] = [None] * len(work)
    turn = asyncio.Semaphore(AT_ONCE)
    async with rpc.channel(hosts[-1].address) as channel, asyncio.TaskGroup() as tasks:
        stub: SandboxServiceAsyncStub = SandboxServiceStub(channel)

        async def one(index: int, task: Task, attempt: Try) -> None:
            async with turn:
                key = EpisodeKey(config.run, f"check-{index:05d}", 0, 0, 1)
                results[index] = tried = await _try(stub, key, task, attempt)
                shown.line(_line(tried))

        for index, (task, attempt) in enumerate(work):
            tasks.create_task(one(index, task, attempt), name=f"{task.name}/{attempt.way}")
    return [result for result in results if result is not None]


def _unbuildable(work: Iterable[tuple[Task, Try]]) -> list[Note]:
    lines = {task.name: task.unbuildable for task, _ in work if task.unbuildable}
    way_out = f'write it with {SUPPORTED}, or choose sandbox.backend = "docker"'
    return [
        Note(name, where, f"{why}: only an image builder can follow it", way_out)
        for name, (where, _, why) in ((name, line.partition(": ")) for name, line in lines.items())
    ]


async def _try(stub: SandboxServiceAsyncStub, key: EpisodeKey, task: Task, attempt: Try) -> Tried:
    try:
        with rpc.calling(f"{task.name}/{attempt.way}"):
            verdict, said = await _in_box(stub, key, task, attempt)
    except MusterError as error:
        return Tried(task.name, attempt.way, attempt.wanted, None, clean(str(error)))
    status = codec.verdict_from_pb(verdict.status)
    reward = verdict.reward if status is VerdictStatus.REWARDED else None
    output = (verdict.output_tail or said).decode("utf-8", "replace")
    detail = f"{status}: {verdict.detail} {output}" if reward != attempt.wanted else ""
    one_line = " ".join(detail.split())
    shown = clean(one_line, longest=_DETAIL_CHARACTERS)
    return Tried(task.name, attempt.way, attempt.wanted, reward, shown)


async def _in_box(
    stub: SandboxServiceAsyncStub, key: EpisodeKey, task: Task, attempt: Try
) -> tuple[pb.VerifyResponse, bytes]:
    episode = codec.key_to_pb(key)
    package = common.TaskPackage(name=task.name, digest=task.digest, archive=task.archive)
    # No limits of our own: the box gets what the task asks for, as in production.
    asking = pb.AcquireBoxRequest(episode=episode, task=package, limits=pb.BoxLimits())
    box = (await stub.AcquireBox(asking, timeout=_CALL_S)).box
    said = b""
    try:
        if attempt.script:
            command = _command(attempt)
            step_s = min(_STEP_S, task.agent_timeout_s or _STEP_S)
            step = pb.ExecRequest(
                episode=episode, box=box, turn=0, command=command, timeout_s=step_s
            )
            answer = await stub.Exec(step, timeout=step_s + _CALL_S)
            said = answer.output_head + answer.output_tail
        verify = pb.VerifyRequest(episode=episode, box=box)
        return await stub.Verify(verify, timeout=task.verifier_timeout_s + _CALL_S), said
    finally:
        release = pb.ReleaseBoxRequest(episode=episode, box=box)
        await stub.ReleaseBox(release, timeout=_CALL_S)


def _command(attempt: Try) -> str:
    settings = [shlex.quote(f"{name}={value}") for name, value in attempt.env]
    return " ".join(
        [*(["env", *settings] if settings else []), "bash -c", shlex.quote(attempt.script)]
    )


def show(results: Sequence[Tried], planned: Plan, as_json: bool) -> int:
    """Print the table, remarks and refusals; the exit status."""
    wrong = [tried for tried in results if not tried.right]
    refused = {note.task for note in planned.refused}
    if as_json:
        for tried in results:
            emit("tried", tried)
        for name, notes in (("remark", planned.remarks), ("refused", planned.refused)):
            for note in notes:
                emit(name, note)
        emit("checked", {"tries": len(results), "wrong": len(wrong), "refused": len(refused)})
    else:
        print(_table(results, sorted(refused)))
        for note in planned.remarks:
            print(clean(f"remark: {note.task}: {note.field}: {note.text}"))
        for note in planned.refused:
            print(clean(f"refused: {note.task}: {note.field}: {note.text} → {note.way_out}"))
        told = f"{len(results)} tries, {len(wrong)} with a wrong reward"
        print(f"{told}; refused: {len(refused)}" if refused else told)
    return 1 if wrong or refused else 0


def _line(tried: Tried) -> str:
    verdict = "right" if tried.right else f"WRONG, wanted {tried.wanted:g}: {tried.detail}"
    reward = "none" if tried.reward is None else f"{tried.reward:g}"
    return f"{tried.task} {tried.way}: {reward} {verdict}"


def _table(results: Iterable[Tried], refused: Sequence[str]) -> str:
    rows: dict[str, dict[str, str]] = {}
    for tried in results:
        reward = "none" if tried.reward is None else f"{tried.reward:g}"
        mark = reward if tried.right else f"{reward} ✗"
        rows.setdefault(tried.task, {})[tried.way] = mark
    for name in refused:
        rows[name] = {way: "refused" for way in _WAYS}
    width = max([len(name) for name in rows] + [4])
    lines = [f"{'task':<{width}}  {'nothing':>8}  {'wrong':>8}  {'solve':>8}"]
    for name, cells in rows.items():
        marks = "  ".join(f"{cells.get(way, ''):>8}" for way in _WAYS)
        lines.append(f"{name:<{width}}  {marks}")
    return "\n".join(lines)
