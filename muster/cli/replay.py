"""`muster replay EPISODE`: the recorded commands once more in a fresh box, and what differs.

In a box of a sandbox host of the run, under a run name of its own, so that the run's owner epochs
and boxes are untouched; of an ended run in a private sandbox, which is gone afterwards. Promise:
the record is only read; every command runs at most once, in its order, with its recorded time
limit; the box is released. Exit status: 0 equal, 1 differences, 2 it cannot be done.
Does not cover: what counts as a difference (muster/replay.py, which the router's repair uses too).
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from muster import codec, rpc
from muster.attach import attached
from muster.clean import clean
from muster.cli.recorded import RecordedEpisode, SeenStep, read_episode
from muster.cli.screen import Screen, emit, screen
from muster.cli.settings import read_config
from muster.cli.up import finish, run_services
from muster.config import Config
from muster.errors import Unavailable
from muster.registry import Entry, Registry
from muster.replay import RecordedStep, difference, output_text
from muster.streams import connect
from muster.supervisor import Work
from muster.types import EpisodeKey, Value, VerdictStatus
from muster.v1 import common_pb2 as common
from muster.v1 import sandbox_pb2 as pb
from muster.v1.sandbox_pb2_grpc import SandboxServiceStub

if TYPE_CHECKING:
    from muster.v1.sandbox_pb2_grpc import SandboxServiceAsyncStub

_CALL_S = 120.0
_VERIFY_S = 1800.0  # two rounds of the longest verifier that a host allows
_STEP_S = 10.0  # where neither record nor configuration tells
_RUN_CHARACTERS = 63
_SHOWN = 100
Tell = Callable[[str], None]


def _silent(line: str) -> None:
    """For whoever looks at the result alone."""


def _tell(line: str) -> None:
    """Beside the result, which goes to standard output."""
    print(clean(line), file=sys.stderr, flush=True)


class TurnReplayed(Value, frozen=True):
    """One command again. `difference` is empty when nothing differs."""

    turn: int
    command: str
    difference: str
    exit_code: int | None  # of the second run; None when it was not run
    output_compared: bool


class Replayed(Value, frozen=True):
    """What came of it. Rewards are None where there was no verdict."""

    episode: str
    task: str
    host: str
    turns: tuple[TurnReplayed, ...]
    recorded_outcome: str
    recorded_reward: float | None
    verdict: str
    reward: float | None
    verdict_difference: str
    unfinished: str = ""

    @property
    def equal(self) -> bool:
        """Nothing differs that could be compared."""
        return not self.verdict_difference and not any(turn.difference for turn in self.turns)


def replay(
    episode: str,
    *,
    run: str | None,
    state_dir: Path | None,
    redis_url: str | None,
    config_path: Path | None,
    as_json: bool,
) -> int:
    """0 when all that could be compared is equal, 1 when not; MusterError when it cannot be."""
    config = read_config(config_path, state_dir=state_dir)
    recorded, hosts = asyncio.run(_found(config, run or config.run, episode, redis_url))
    if hosts:
        done = asyncio.run(replay_at(hosts, recorded, config, _tell))
        return show(done, as_json)
    results: list[Replayed] = []
    with screen(as_json) as shown:
        ended = run_services(
            _aside(config, recorded.run),
            shown,
            lambda resolved: _privately(resolved, recorded, results, shown),
            only=("sandbox",),
        )
    if ended.line or ended.interrupted or not results:
        return finish(ended, interrupted_status=130)
    return show(results[0], as_json)


async def replay_at(
    hosts: list[Entry], recorded: RecordedEpisode, config: Config, tell: Tell = _silent
) -> Replayed:
    """Run the commands on one of these hosts: the episode's own if it is among them. `tell`: what
    runs now, and how long it may."""
    host = next((entry for entry in hosts if entry.id == recorded.host), hosts[0])
    tell(f"{recorded.id}: task {recorded.task}, {len(recorded.steps)} commands on {host.id}")
    async with rpc.channel(host.address) as channel:
        stub: SandboxServiceAsyncStub = SandboxServiceStub(channel)
        with rpc.calling(f"replaying on sandbox host {host.id}"):
            return await _in_box(stub, host.id, recorded, config, tell)


async def _found(
    config: Config, run: str, episode: str, redis_url: str | None
) -> tuple[RecordedEpisode, list[Entry]]:
    """The record, and the sandbox hosts that are alive."""
    async with attached(config, redis_url) as client:
        recorded = await read_episode(client, run, episode, config.history(run))
        return recorded, await Registry(client, run).list("sandbox")


def _aside(config: Config, run: str) -> Config:
    """A sandbox of our own, with the run's settings but nothing of its state."""
    sections = dict(config.sections)
    changes: dict[str, Any] = {"listen": "127.0.0.1:0", "host_id": "", "runtime_dir": None}
    sections["sandbox"] = sections["sandbox"].model_copy(update=changes)
    return config.model_copy(
        update={
            "run": _run_name(run),
            "state_dir": config.state_dir / "replay",
            "redis": config.redis.model_copy(update={"url": ""}),
            "sections": sections,
        }
    )


def _privately(
    resolved: Config, recorded: RecordedEpisode, results: list[Replayed], shown: Screen
) -> Work:
    async def work() -> None:
        async with connect(resolved.redis) as client:
            hosts = await Registry(client, resolved.run).list("sandbox")
        if not hosts:
            raise Unavailable("the sandbox is no longer listed", way_out="see logs/sandbox.log")
        shown.line(
            f"no host of the run is up: its commands run in a sandbox of {resolved.state_dir}"
        )
        results.append(await replay_at(hosts, recorded, resolved, shown.line))

    return work


async def _in_box(
    stub: SandboxServiceAsyncStub, host: str, recorded: RecordedEpisode, config: Config, tell: Tell
) -> Replayed:
    # A group of its own: two replays of one episode must not share a box.
    key = EpisodeKey(_run_name(recorded.run), f"replay-{secrets.token_hex(4)}", 0, 1, 1)
    episode = codec.key_to_pb(key)
    package = common.TaskPackage(
        name=recorded.task, digest=recorded.digest, archive=recorded.archive
    )
    asking = pb.AcquireBoxRequest(episode=episode, task=package, limits=_limits(config))
    box = (await stub.AcquireBox(asking, timeout=_CALL_S)).box
    try:
        turns = [turn async for turn in _turns(stub, episode, box, recorded, config, tell)]
        tell("the result is verified")
        verify = pb.VerifyRequest(episode=episode, box=box)
        verdict = await stub.Verify(verify, timeout=_VERIFY_S)
    finally:
        release = pb.ReleaseBoxRequest(episode=episode, box=box)
        await stub.ReleaseBox(release, timeout=_CALL_S)
    return _judged(recorded, host, tuple(turns), verdict)


async def _turns(
    stub: SandboxServiceAsyncStub,
    episode: common.EpisodeKey,
    box: str,
    recorded: RecordedEpisode,
    config: Config,
    tell: Tell,
) -> AsyncIterator[TurnReplayed]:
    broken = ""
    for seen in recorded.steps:
        before = seen.step
        if broken:
            yield TurnReplayed(before.turn, before.command, broken, None, False)
            continue
        limit_s = before.timeout_s or _setting(config, "step_timeout_s", _STEP_S)
        command = _one_line(before.command)
        tell(f"turn {before.turn} runs, at most {limit_s:g} s: {command}")
        request = pb.ExecRequest(
            episode=episode,
            box=box,
            turn=before.turn,
            command=before.command,
            timeout_s=limit_s,
        )
        answer = await stub.Exec(request, timeout=limit_s + _CALL_S)
        if answer.box_broken:
            broken = f"not run: turn {before.turn} broke the box"
        yield compared(seen, answer)


def compared(seen: SeenStep, answer: pb.ExecResponse) -> TurnReplayed:
    """The second run of a step beside the first; an output that is gone is not compared."""
    before = seen.step
    said = output_text(answer.output_head, answer.output_tail, answer.output_bytes_total)
    again = RecordedStep(
        turn=before.turn,
        command=before.command,
        exit_code=answer.exit_code,
        limit=codec.limit_from_pb(answer.limit),
        output=said if seen.whole else before.output,
    )
    found = difference(before, again)
    if not found and answer.box_broken != seen.box_broken:
        found = "the box broke" if answer.box_broken else "the box did not break"
    return TurnReplayed(before.turn, before.command, found, answer.exit_code, seen.whole)


def _judged(
    recorded: RecordedEpisode, host: str, turns: tuple[TurnReplayed, ...], answer: pb.VerifyResponse
) -> Replayed:
    status = codec.verdict_from_pb(answer.status)
    reward = answer.reward if status is VerdictStatus.REWARDED else None
    label = recorded.label
    before = label.reward if label else None
    found = ""
    if before is not None and reward != before:
        found = f"reward {_number(reward)} instead of {_number(before)}"
    return Replayed(
        episode=recorded.id,
        task=recorded.task,
        host=host,
        turns=turns,
        recorded_outcome=f"{label.outcome}/{label.cause}" if label else "",
        recorded_reward=before,
        verdict=f"{status} {answer.detail}".strip(),
        reward=reward,
        verdict_difference=found,
        unfinished=recorded.unfinished,
    )


def show(done: Replayed, as_json: bool) -> int:
    """Print it; the exit status."""
    if as_json:
        whole = _clean(msgspec.to_builtins(done)) | {"equal": done.equal}
        for turn in whole.pop("turns"):
            emit("turn", _clean(turn))
        emit("replayed", whole)
    else:
        print("\n".join(map(clean, _lines(done))))
    return 0 if done.equal else 1


def _clean(fields: dict[str, Any]) -> dict[str, Any]:
    """The texts, some of which a box has said, without control characters and secrets."""
    return {
        name: clean(value) if isinstance(value, str) else value for name, value in fields.items()
    }


def _lines(done: Replayed) -> Iterator[str]:
    yield f"{done.episode}: task {done.task}, {len(done.turns)} commands again on {done.host}"
    for turn in done.turns:
        command = _one_line(turn.command)
        if turn.difference:
            yield f"  turn {turn.turn}  DIFFERENT  {command}"
            yield f"          {turn.difference}"
        else:
            note = "" if turn.output_compared else "  (output deleted: exit and limit compared)"
            yield f"  turn {turn.turn}  equal      {command}{note}"
    if done.unfinished:
        yield f"  not run: {done.unfinished[:_SHOWN]!r} has no recorded result"
    yield f"  recorded  {done.recorded_outcome or 'no label yet'}, reward " + _number(
        done.recorded_reward
    )
    yield f"  again     {' '.join(done.verdict.split())[:_SHOWN]}, reward {_number(done.reward)}"
    if done.verdict_difference:
        yield f"  the verdict is DIFFERENT: {done.verdict_difference}"
    elif done.recorded_reward is None:
        yield "  the record has no reward to compare with"
    yield "equal" if done.equal else "there are differences"


def _one_line(command: str) -> str:
    return " ; ".join(command.strip().splitlines())[:_SHOWN]


def _number(reward: float | None) -> str:
    return "none" if reward is None else f"{reward:g}"


def _run_name(run: str) -> str:
    return f"replay-{run}"[:_RUN_CHARACTERS]


def _limits(config: Config) -> pb.BoxLimits:
    """What the router of these settings would ask for."""
    names = ("memory_bytes", "pids", "disk_bytes", "disk_inodes", "output_bytes")
    return pb.BoxLimits(**{name: int(_setting(config, f"box_{name}", 0)) for name in names})


def _setting(config: Config, name: str, otherwise: float) -> float:
    """Of section [router], whose type only the router knows."""
    return float(getattr(config.sections.get("router"), name, otherwise))
