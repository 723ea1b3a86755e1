"""`muster tasks check`: does each task reward its solution, and only that?

Starts the sandbox service alone, and tries every task three times in a fresh box: doing nothing
must give 0, solution/wrong.sh 0, solution/solve.sh 1; a task with parameters so for each of several
seeds. The scripts are read here and sent as one command: no box ever holds the solution folder.
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
from muster.errors import InvalidInput, MusterError, Unavailable
from muster.registry import Registry
from muster.streams import connect
from muster.supervisor import Work
from muster.taskset import Task, fill, read_task, task_folders
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


class Try(Value, frozen=True):
    """One way to attempt a task and the reward it must get."""

    way: str  # nothing, wrong or solve
    script: str
    wanted: float


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


def check(path: Path, *, seeds: int = 1, config_path: Path | None, as_json: bool) -> int:
    """0 when every try got the reward it must get, 1 when one did not."""
    config = read_config(config_path)
    work = [
        (task, attempt)
        for task, folder, seed in _tasks(path, seeds)
        for attempt in tries(folder, seed)
    ]
    results: list[Tried] = []
    # A state folder of its own: a check may run beside `muster up`.
    aside = config.model_copy(update={"state_dir": config.state_dir / "check"})
    with screen(as_json) as shown:

        def work_of(resolved: Config) -> Work:
            async def judge() -> None:
                results.extend(await _judge(resolved, work, shown))

            return judge

        ended = run_services(aside, shown, work_of, only=("sandbox",))
    if ended.line or ended.interrupted:
        return finish(ended, interrupted_status=130)
    return show(results, as_json)


def tries(folder: Path, seed: int | None = None) -> tuple[Try, ...]:
    """The three tries of the task in `folder`; InvalidInput when a script is missing."""
    return (
        Try("nothing", "", 0.0),
        Try("wrong", _script(folder, "solution/wrong.sh", seed), 0.0),
        Try("solve", _script(folder, "solution/solve.sh", seed), 1.0),
    )


def _tasks(path: Path, seeds: int) -> list[tuple[Task, Path, int | None]]:
    """Every task below `path`; one with parameters under so many seeds, from its split's first."""
    found: list[tuple[Task, Path, int | None]] = []
    for folder in task_folders(path):
        task = read_task(folder)
        first = task.name.partition("@")[2]
        if not first:
            found.append((task, folder, None))
            continue
        for seed in range(int(first), int(first) + seeds):
            found.append((read_task(folder, seed=seed), folder, seed))
    return found


def _script(folder: Path, name: str, seed: int | None) -> str:
    path = folder / name
    if not path.is_file():
        raise InvalidInput(
            "the check needs this script",
            field="task",
            value=path,
            way_out="add solution/solve.sh, which solves the task, and solution/wrong.sh, which "
            "looks right and is not",
        )
    text = fill(folder, name, seed)
    if len(text.encode()) > SCRIPT_BYTES_MAX:
        raise InvalidInput(
            f"over {SCRIPT_BYTES_MAX} bytes", field="task", value=path, way_out="make it shorter"
        )
    return text


async def _judge(config: Config, work: Sequence[tuple[Task, Try]], shown: Screen) -> list[Tried]:
    async with connect(config.redis) as redis:
        hosts = await Registry(redis, config.run).list("sandbox")
    if not hosts:
        raise Unavailable("the sandbox is no longer listed", way_out="see logs/sandbox.log")
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
            command = f"bash -c {shlex.quote(attempt.script)}"
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


def show(results: Sequence[Tried], as_json: bool) -> int:
    """Print the table; the exit status."""
    wrong = [tried for tried in results if not tried.right]
    if as_json:
        for tried in results:
            emit("tried", tried)
        emit("checked", {"tries": len(results), "wrong": len(wrong)})
    else:
        print(_table(results))
        print(f"{len(results)} tries, {len(wrong)} with a wrong reward")
    return 1 if wrong else 0


def _line(tried: Tried) -> str:
    verdict = "right" if tried.right else f"WRONG, wanted {tried.wanted:g}: {tried.detail}"
    reward = "none" if tried.reward is None else f"{tried.reward:g}"
    return f"{tried.task} {tried.way}: {reward} {verdict}"


def _table(results: Iterable[Tried]) -> str:
    rows: dict[str, dict[str, str]] = {}
    for tried in results:
        reward = "none" if tried.reward is None else f"{tried.reward:g}"
        mark = reward if tried.right else f"{reward} ✗"
        rows.setdefault(tried.task, {})[tried.way] = mark
    width = max([len(name) for name in rows] + [4])
    lines = [f"{'task':<{width}}  {'nothing':>8}  {'wrong':>8}  {'solve':>8}"]
    for name, cells in rows.items():
        marks = "  ".join(f"{cells.get(way, ''):>8}" for way in ("nothing", "wrong", "solve"))
        lines.append(f"{name:<{width}}  {marks}")
    return "\n".join(lines)
