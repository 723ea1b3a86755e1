"""`muster replay`: recorded commands again, against a real server of streams and real hosts."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zstandard
from redis.asyncio import Redis

from muster import codec, rpc
from muster.archive import TaskFile, pack_files
from muster.cli.recorded import read_episode
from muster.cli.replay import Replayed, replay_at
from muster.config import Config, RedisConfig
from muster.errors import InvalidInput, NotFound
from muster.history import History
from muster.registry import Entry, Registry
from muster.streams import RunStreams, StreamEntry, connect
from muster.types import EpisodeKey, Outcome, OutcomeLabel
from muster.v1 import common_pb2 as common
from muster.v1 import events_pb2 as ev
from muster.v1 import sandbox_pb2 as pb
from muster.v1.sandbox_pb2_grpc import SandboxServiceStub, add_SandboxServiceServicer_to_server
from services.sandbox.adapters.fake import open_fake
from services.sandbox.config import SandboxConfig
from services.sandbox.driver import SandboxHost
from services.sandbox.server import SERVICE_NAME, SandboxServicer
from tests.integration.conftest import RedisServer

ID = "job-1-00003.2.1"
TEXTS = {
    "instruction.md": "Write 1 to answer.txt.",
    "environment/Dockerfile": "FROM scratch\nWORKDIR /app\n",
    "tests/test.sh": "test -f answer.txt && cat answer.txt > /logs/verifier/reward.txt",
}
ARCHIVE = pack_files({path: TaskFile(0o644, text.encode()) for path, text in TEXTS.items()})
DIGEST = hashlib.sha256(ARCHIVE).hexdigest()
Seen = tuple[str, str, int]  # command, output, exit code
TWO: Sequence[Seen] = (("echo 1 > answer.txt", "", 0), ("cat answer.txt; exit 3", "1\n", 3))


async def record(
    redis: Redis, run: str, seen: Sequence[Seen] = TWO, reward: float = 1.0, intended: str = ""
) -> RunStreams:
    """What a router writes of one episode."""
    streams = RunStreams(redis, run)
    key = codec.key_to_pb(EpisodeKey(run, "job-1-00003", 2, 1, 7))
    opened = ev.GroupOpened(job="job-1", task="team/task", task_digest=DIGEST, group_size=4)
    events = [("opened", ev.TrajectoryEvent(episode=key, group_opened=opened))]
    outputs = {streams.key("task", DIGEST): ARCHIVE}
    for turn, (command, output, code) in enumerate(seen):
        told = ev.TurnIntended(turn=turn, command=command, timeout_s=5)
        events.append((f"{ID}#{turn}/intent", ev.TrajectoryEvent(episode=key, turn_intended=told)))
        output_key = streams.key("o", f"{ID}.{turn}")
        outputs[output_key] = zstandard.compress(output.encode())
        done = ev.TurnFinished(
            turn=turn, command=command, exit_code=code, output_key=output_key, host="h1"
        )
        events.append((f"{ID}#{turn}", ev.TrajectoryEvent(episode=key, turn_finished=done)))
    if intended:
        told = ev.TurnIntended(turn=len(seen), command=intended)
        events.append((f"{ID}#last", ev.TrajectoryEvent(episode=key, turn_intended=told)))
    entries = [StreamEntry("events", "g:x", name, e.SerializeToString()) for name, e in events]
    label = OutcomeLabel(Outcome.MODEL_SUCCESS, "rewarded", reward=reward)
    message = codec.label_to_pb(codec.key_from_pb(key), label).SerializeToString()
    entries.append(StreamEntry("outcomes", "g:x", f"{ID}#label", message))
    await streams.append(entries, outputs)
    return streams


@asynccontextmanager
async def fake_host() -> AsyncIterator[tuple[SandboxHost, str]]:
    async with (
        open_fake() as backend,
        SandboxHost(backend, SandboxConfig(warm_max=0), "h1") as host,
    ):
        servicer = (add_SandboxServiceServicer_to_server, SandboxServicer(host))
        async with rpc.serve("127.0.0.1:0", [servicer], names=[SERVICE_NAME]) as server:
            yield host, server.address


async def replayed(redis: Redis, run: str, history: Path | None = None) -> Replayed:
    recorded = await read_episode(redis, run, ID, history)
    async with fake_host() as (host, address):
        done = await replay_at([Entry("sandbox", "h1", address)], recorded, Config())
        assert host.boxes == 0, "the box is given back"
    return done


async def test_the_same_commands_show_the_same(redis: Redis, run: str) -> None:
    await record(redis, run)
    done = await replayed(redis, run)
    assert [turn.difference for turn in done.turns] == ["", ""]
    assert all(turn.output_compared for turn in done.turns)
    assert (done.recorded_reward, done.reward, done.equal) == (1.0, 1.0, True)


async def test_what_runs_is_told_before_it_runs(redis: Redis, run: str) -> None:
    """A command may hang for its whole limit: whoever waits knows what for."""
    await record(redis, run)
    recorded = await read_episode(redis, run, ID)
    told: list[str] = []
    async with fake_host() as (_, address):
        await replay_at([Entry("sandbox", "h1", address)], recorded, Config(), told.append)
    assert told[0] == f"{ID}: task team/task, 2 commands on h1"
    assert told[1] == "turn 0 runs, at most 5 s: echo 1 > answer.txt"
    assert told[-1] == "the result is verified"


async def test_what_differs_is_named_by_turn(redis: Redis, run: str) -> None:
    await record(redis, run, [TWO[0], ("cat answer.txt; exit 3", "2\n", 3)], reward=0.5)
    done = await replayed(redis, run)
    first, second = done.turns
    assert first.difference == ""
    assert second.difference == "line 1 of the output: '1' instead of '2'"
    assert done.verdict_difference == "reward 1 instead of 0.5"
    assert not done.equal


async def test_outputs_that_were_deleted_are_not_compared(redis: Redis, run: str) -> None:
    streams = await record(redis, run, [TWO[0], ("cat answer.txt; exit 3", "2\n", 3)])
    await redis.delete(*(streams.key("o", f"{ID}.{turn}") for turn in (0, 1)))
    done = await replayed(redis, run)
    assert [turn.output_compared for turn in done.turns] == [False, False]
    assert done.equal


async def test_entries_that_were_trimmed_are_read_from_disk(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    streams = await record(redis, run)
    events = await streams.read_all("events")
    # Some are in both places: a crash may come between keeping and trimming.
    History(tmp_path).append([*events[:4], *await streams.read_all("outcomes")])
    await streams.trim("events", events[2].id)
    await redis.delete(streams.key("outcomes"))
    done = await replayed(redis, run, tmp_path)
    assert [turn.turn for turn in done.turns] == [0, 1]
    assert (done.recorded_outcome, done.equal) == ("model_success/rewarded", True)


async def test_a_command_without_a_result_is_shown_and_not_run(redis: Redis, run: str) -> None:
    await record(redis, run, intended="echo 0 > answer.txt")
    done = await replayed(redis, run)
    assert (len(done.turns), done.unfinished) == (2, "echo 0 > answer.txt")
    assert done.reward == 1.0


async def test_commands_after_one_that_broke_the_box_are_not_run(redis: Redis, run: str) -> None:
    await record(redis, run, [("kill-box", "", 137), TWO[0]])
    recorded = await read_episode(redis, run, ID)
    async with fake_host() as (_, address):
        done = await replay_at([Entry("sandbox", "h1", address)], recorded, Config())
    assert done.turns[1].difference == "not run: turn 0 broke the box"
    assert not done.equal


async def test_the_runs_own_boxes_and_epoch_are_untouched(redis: Redis, run: str) -> None:
    """The box of the very episode that is replayed lives on, and its owner is not fenced."""
    await record(redis, run)
    recorded = await read_episode(redis, run, ID)
    mine = codec.key_to_pb(EpisodeKey(run, "job-1-00003", 2, 1, 7))
    package = common.TaskPackage(name="t", digest=DIGEST, archive=ARCHIVE)
    async with fake_host() as (host, address), rpc.channel(address) as channel:
        stub = SandboxServiceStub(channel)
        box = await stub.AcquireBox(pb.AcquireBoxRequest(episode=mine, task=package), timeout=10)
        done = await replay_at([Entry("sandbox", "h1", address)], recorded, Config())
        step = pb.ExecRequest(
            episode=mine, box=box.box, turn=0, command="cat answer.txt", timeout_s=5
        )
        assert (await stub.Exec(step, timeout=10)).exit_code == 1, "nothing was written there"
        assert host.boxes == 1
    assert done.equal


@pytest.mark.parametrize(
    ("episode", "error", "told"),
    [
        ("job-1", InvalidInput, "write GROUP.SIBLING.ATTEMPT"),
        ("job-9-00000.0.1", NotFound, "has no group job-9-00000 → did you mean job-1-00003[?] "),
        ("job-1-00003.2.9", NotFound, "no turn of this attempt .* siblings are 0 to 3"),
    ],
)
async def test_what_cannot_be_replayed_is_told(
    redis: Redis, run: str, episode: str, error: type[Exception], told: str
) -> None:
    await record(redis, run)
    with pytest.raises(error, match=told):
        await read_episode(redis, run, episode)


async def test_a_run_that_is_not_there_names_those_that_are(redis: Redis, run: str) -> None:
    await record(redis, run)
    with pytest.raises(NotFound, match=f"runs here: .*{run}.*; choose with --run"):
        await read_episode(redis, "another", ID)


async def command_line(*words: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "muster.cli.main", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


async def test_a_run_that_goes_on_lends_one_of_its_hosts(
    redis: Redis, run: str, redis_url: str
) -> None:
    await record(redis, run)
    async with (
        fake_host() as (host, address),
        Registry(redis, run).announce("sandbox", "h1", address),
    ):
        status, out = await command_line("replay", ID, "--run", run, "--redis", redis_url)
        assert host.boxes == 0
    assert (status, out.splitlines()[-1]) == (0, "equal"), out
    assert "2 commands again on h1" in out


@pytest.mark.root
async def test_an_ended_run_is_replayed_in_real_boxes_of_its_own(tmp_path: Path) -> None:
    """Streams that a server left behind, a private sandbox, real bash; nothing is left."""
    state = tmp_path / "s"
    (state / "redis").mkdir(parents=True)
    server = RedisServer(state / "redis")
    server.start()
    pipes: Seen = ("echo b; echo a | tee x; cd /tmp; false", "b\na\n", 1)
    try:
        async with connect(RedisConfig(url=server.url)) as client:
            await record(client, "main", [*TWO, pipes])
            await record(client, "other", [*TWO, ("date +%N", "1\n", 0)])
            await client.execute_command("WAITAOF", 1, 0, 5000)
    finally:
        server.kill()
    status, out = await command_line("replay", ID, "--state-dir", str(state))
    assert status == 0, out
    assert "turn 2  equal      echo b; echo a" in out
    assert "recorded  model_success/rewarded, reward 1" in out
    assert "again     rewarded, reward 1" in out
    status, out = await command_line(
        "replay", ID, "--state-dir", str(state), "--run", "other", "--json"
    )
    assert status == 1, out
    assert '"difference":"line 1 of the output: ' in out
    status, out = await command_line("replay", "job-1-00003.0.1", "--state-dir", str(state))
    assert status == 2, out
    assert "no turn of this attempt is recorded" in out
