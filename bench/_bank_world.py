"""What bench.bank runs on: a server of its own, the bank as a process, groups as a router writes
them, a trainer that leases.

Owns: the processes, which end with the context. Promise: payloads are made once and written again
under other keys, so making them is in no figure.
"""

from __future__ import annotations

import array
import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Literal

import grpc
import zstandard
from redis.asyncio import Redis

from muster import codec, rpc
from muster import payload as payloads
from muster.clock import monotonic
from muster.config import RedisConfig
from muster.registry import Registry
from muster.streams import RunStreams, StreamEntry, connect, next_epoch
from muster.supervise.plan import server_binary, server_options
from muster.types import EpisodeKey, Outcome, OutcomeLabel, VersionSpan
from muster.v1 import common_pb2 as pb
from muster.v1 import events_pb2 as ev
from muster.v1 import readybank_pb2 as rb
from muster.v1.readybank_pb2_grpc import ReadyBankServiceStub
from services.readybank.server import NAME

Policy = Literal["always", "everysec"]
RUN, DEADLINE_S = "bench", 120.0
LABELS = (
    OutcomeLabel(Outcome.MODEL_SUCCESS, "passed", 1.0),
    OutcomeLabel(Outcome.MODEL_FAILURE, "not_passed", 0.0),
)


def start(command: Sequence[str], **streams: int) -> subprocess.Popen[bytes]:
    """In a process group of its own."""
    return subprocess.Popen(command, process_group=0, **streams)  # type: ignore[call-overload, no-any-return]


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Killed with its group when the block is left."""
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@asynccontextmanager
async def server(folder: Path, fsync: Policy) -> AsyncIterator[tuple[Redis, str]]:
    """A durable server in `folder`; a client of it and its address."""
    config = RedisConfig(url=f"unix://{folder}/s", connections_max=64, appendfsync=fsync)
    command = [server_binary(), *server_options(config, folder, f"{folder}/s")]
    quiet = subprocess.DEVNULL
    with ended(start(command, stdout=quiet, stderr=quiet)):
        began = monotonic()
        while not (folder / "s").exists():
            if monotonic() - began > DEADLINE_S:
                raise SystemExit("the server does not come up")
            await asyncio.sleep(0.05)
        async with connect(config) as client:
            yield client, config.url


@asynccontextmanager
async def bank(folder: Path, redis: Redis, url: str) -> AsyncIterator[tuple[int, grpc.aio.Channel]]:
    """A bank's process id and a channel to it."""
    path = folder / "bench.toml"
    path.write_text(
        f'run = "{RUN}"\nstate_dir = "{folder}/state"\n[redis]\nurl = "{url}"\n'
        '[readybank]\ntick_s = 0.1\n[telemetry]\nlog_level = "WARNING"\ntraces = false\n'
    )
    command = [sys.executable, "-m", "services.readybank", "--config", str(path)]
    with ended(start(command)) as process:
        async with asyncio.timeout(DEADLINE_S):
            while not (found := await Registry(redis, RUN).list("readybank")):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        async with rpc.channel(found[-1].address) as channel:
            yield process.pid, channel


class Router:
    """Writes whole groups, each sibling with the same `payloads`, one a turn."""

    def __init__(self, redis: Redis, epoch: int, payloads: Sequence[bytes], sampled: int):
        self.streams = RunStreams(redis, RUN, role="router", epoch=epoch)
        self._redis = redis
        self._epoch, self._payloads, self._sampled = epoch, payloads, sampled

    async def group(self, index: int, siblings: int) -> None:
        """Opened, run and judged."""
        group = f"job-{index:05d}"
        opened = ev.GroupOpened(job="job", task="task", group_size=siblings)
        event = ev.TrajectoryEvent(group_opened=opened)
        event.episode.CopyFrom(codec.key_to_pb(EpisodeKey(RUN, group, 0, 0, self._epoch)))
        await self.streams.append([_entry("events", "opened", event)])
        for sibling in range(siblings):
            key = EpisodeKey(RUN, group, sibling, 0, self._epoch)
            for turn in range(len(self._payloads)):
                entry, payloads = self.turn(key, turn)
                await self.streams.append([entry], payloads)
            over = ev.EpisodeFinished(turns=len(self._payloads))
            end = ev.TrajectoryEvent(episode=codec.key_to_pb(key), episode_finished=over)
            label = codec.label_to_pb(key, LABELS[sibling % 2])
            entries = [_entry("events", f"{key.id}#end", end)]
            entries.append(_entry("outcomes", f"{key.id}#label", label))
            await self.streams.append(entries)

    async def follow(self) -> None:
        """Say that everything there is was read: the bank trims nothing that a router has not."""
        found: dict[str, str] = {}
        for stream in ("fates", "batches"):
            newest: Any = await self._redis.xrevrange(self.streams.key(stream), count=1)
            for id_, _ in newest:
                found[stream] = id_.decode()
        await self.streams.mark_read(found)

    def turn(self, key: EpisodeKey, number: int) -> tuple[StreamEntry, dict[str, bytes]]:
        """The entry and the payload of one turn."""
        name = self.streams.key("p", f"{key.id}.{number}")
        spans = codec.spans_to_pb([VersionSpan(0, 0, self._sampled, 0)])
        turn = ev.TurnFinished(
            turn=number, payload_key=name, sampled_tokens=self._sampled, spans=spans
        )
        event = ev.TrajectoryEvent(episode=codec.key_to_pb(key), seq=number, turn_finished=turn)
        payload = self._payloads[number % len(self._payloads)]
        return _entry("events", f"{key.id}#{number}", event), {name: payload}


def _entry(stream: str, dedupe: str, message: ev.TrajectoryEvent | ev.OutcomeLabel) -> StreamEntry:
    needs = "" if dedupe == "opened" else "opened"
    scope = f"g:{message.episode.group}"
    return StreamEntry(stream, scope, dedupe, message.SerializeToString(), needs=needs)


def payload(tokens: int, sampled: int) -> bytes:
    """One turn's tokens, the last `sampled` of them with log-probabilities, packed as a router
    packs them. Ids spread over a vocabulary of 49,152: they compress no better than real ones."""
    chance = random.Random(tokens)
    seen = [chance.randrange(49152) for _ in range(tokens - sampled)]
    said = [chance.randrange(49152) for _ in range(sampled)]
    segments = [
        pb.Segment(kind=pb.SEGMENT_KIND_OBSERVATION, token_ids=_packed("i", seen)),
        pb.Segment(
            kind=pb.SEGMENT_KIND_MODEL,
            token_ids=_packed("i", said),
            logprobs=_packed("f", [-chance.random() for _ in said]),
            spans=codec.spans_to_pb([VersionSpan(0, 0, sampled, 0)]),
        ),
    ]
    plain = ev.TurnPayload(segments=segments).SerializeToString()
    return zstandard.ZstdCompressor(level=1).compress(plain)


def _packed(kind: str, values: Sequence[float]) -> bytes:
    return array.array(kind, values).tobytes()


async def lease(
    channel: grpc.aio.Channel,
    step: int,
    groups: int,
    epoch: int = 1,
    read: Callable[[bytes], int] = len,
) -> list[int]:
    """What `read` says of each message, its bytes by default; they are dropped as they come."""
    request = rb.LeaseBatchRequest(run=RUN, trainer_epoch=epoch, step=step, groups=groups)
    call: Any = channel.unary_stream(
        f"/{NAME}/LeaseBatch",
        request_serializer=rb.LeaseBatchRequest.SerializeToString,
        response_deserializer=None,
    )(request, timeout=DEADLINE_S)
    return [read(part) async for part in call]


def unpacked(part: bytes) -> int:
    """Bytes of tokens in a message of a lease, read as a trainer reads it; 0 for the header."""
    turns = rb.LeaseBatchResponse.FromString(part).trajectory.turns
    return sum(payloads.unpacked(turn.key, turn.payload).ByteSize() for turn in turns)


async def register(channel: grpc.aio.Channel, epoch: int) -> None:
    """A trainer without a checkpoint."""
    request = rb.RegisterTrainerRequest(run=RUN, trainer_epoch=epoch)
    await ReadyBankServiceStub(channel).RegisterTrainer(request, timeout=DEADLINE_S)


async def acknowledge(channel: grpc.aio.Channel, step: int, kept: int) -> None:
    request = rb.AcknowledgeBatchRequest(run=RUN, trainer_epoch=1, step=step, oldest_kept_step=kept)
    await ReadyBankServiceStub(channel).AcknowledgeBatch(request, timeout=DEADLINE_S)


async def router(redis: Redis, payloads: Sequence[bytes], sampled: int) -> Router:
    """In charge of the run."""
    return Router(redis, await next_epoch(redis, RUN, "router"), payloads, sampled)
