"""Replicas and sandbox hosts that think for a while and say the same each time: what a router is
measured against. A process of its own.

    python -m bench._router_fakes --redis URL --run NAME --model FOLDER [--think-ms 50] …

Owns: the answers, packed once. Promise: real gRPC and the real registry; every reply is a command
of `reply_tokens` tokens, every step prints `output_bytes` of text; a request costs this process as
little as Python allows, so that it is not what is measured. Verdicts differ between siblings, so
that a bank trains their groups. Does not cover: a KV cache (all of a context but the last turn is
said to be cached), failures, boxes that remember.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc

from muster import streams
from muster.codec import pack_f32, pack_ids
from muster.config import RedisConfig
from muster.registry import Registry
from muster.tasks import end
from muster.v1 import common_pb2 as pb
from muster.v1 import inference_pb2 as inf
from muster.v1 import sandbox_pb2 as sbx
from services.inference.adapters.follow import follow
from services.router.adapters.tokenizer import HfChatCodec

_OPTIONS = [("grpc.max_receive_message_length", 64 << 20), ("grpc.so_reuseport", 0)]
_CREDIT_TOKENS = 1 << 30
_BLOCK = 16

Handler = Callable[[bytes, Any], Awaitable[bytes]]


class Fakes:
    """The methods of both services over raw bytes; only what an answer depends on is parsed."""

    def __init__(self, codec: HfChatCodec, *, think_s: float, reply_tokens: int, output_bytes: int):
        self._think_s = think_s
        self._reply_tokens = reply_tokens
        ids = reply(codec, reply_tokens)
        self._ids, self._logprobs = pack_ids(ids), pack_f32([-0.5] * len(ids))
        self._sampled, self._version = len(ids), 0
        text = (
            "total 8 drwxr-xr-x 2 agent agent 4096 notes.txt\n" * (output_bytes // 48 + 1)
        ).encode()
        self._step = sbx.ExecResponse(
            limit=sbx.STEP_LIMIT_NONE,
            wall_s=think_s,
            cpu_s=think_s,
            output_head=text[:output_bytes],
            output_bytes_total=output_bytes,
        ).SerializeToString()
        self._steps = 0
        self.boxes: set[str] = set()

    def follow(self, version: int) -> None:
        """Say from now on that one's answers are of this version."""
        self._version = version

    # -- a replica -----------------------------------------------------------------------

    async def generate(self, data: bytes, context: Any) -> AsyncIterator[bytes]:
        del context
        await asyncio.sleep(self._think_s)
        self._steps += 1
        prompt = len(data) // 4  # bytes of the prompt, but for a few dozen
        finish = inf.GenerateFinish(
            reason=inf.FINISH_REASON_STOP,
            spans=[pb.VersionSpan(version=self._version, start=0, end=self._sampled)],
            cached_tokens=max(0, prompt - self._reply_tokens) // _BLOCK * _BLOCK,
            prefill_s=0.01,
            decode_s=self._think_s,
        )
        answer = inf.GenerateResponse(token_ids=self._ids, logprobs=self._logprobs, finish=finish)
        yield answer.SerializeToString()

    async def grant(self, data: bytes, context: Any) -> bytes:
        del data, context
        answer = inf.GrantKvResponse(
            life="fake",
            state=inf.REPLICA_STATE_SERVING,
            version=self._version,
            credit_tokens=_CREDIT_TOKENS,
            ttl_s=5.0,
            block_size=_BLOCK,
            steps=self._steps,
        )
        return answer.SerializeToString()

    async def aborted(self, data: bytes, context: Any) -> bytes:
        del data, context
        return inf.AbortResponse(found=True).SerializeToString()

    async def nothing(self, data: bytes, context: Any) -> bytes:
        """The empty message: an answer of any type with its defaults."""
        del data, context
        return b""

    # -- a host --------------------------------------------------------------------------

    async def acquire(self, data: bytes, context: Any) -> bytes:
        del context
        key = sbx.AcquireBoxRequest.FromString(data).episode
        box = f"{key.group}.{key.sibling}.{key.attempt}"
        self.boxes.add(box)
        return sbx.AcquireBoxResponse(box=box, host="fake").SerializeToString()

    async def exec(self, data: bytes, context: Any) -> bytes:
        del data, context
        await asyncio.sleep(self._think_s)
        return self._step

    async def verify(self, data: bytes, context: Any) -> bytes:
        del context
        passed = sbx.VerifyRequest.FromString(data).episode.sibling % 2 == 0
        status = sbx.VERDICT_STATUS_REWARDED
        return sbx.VerifyResponse(status=status, reward=float(passed)).SerializeToString()

    async def release(self, data: bytes, context: Any) -> bytes:
        del context
        self.boxes.discard(sbx.ReleaseBoxRequest.FromString(data).box)
        return sbx.ReleaseBoxResponse(existed=True).SerializeToString()

    def services(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """Registry kind → service name and its methods."""
        engine: dict[str, Handler] = {
            "GrantKv": self.grant,
            "ClaimReplica": self.nothing,
            "Abort": self.aborted,
        }
        host: dict[str, Handler] = {
            "ClaimHost": self.nothing,
            "AcquireBox": self.acquire,
            "Exec": self.exec,
            "Verify": self.verify,
            "ReleaseBox": self.release,
        }
        generate: dict[str, Any] = {"Generate": grpc.unary_stream_rpc_method_handler(self.generate)}
        return {
            "inference": ("muster.v1.InferenceService", _unary(engine) | generate),
            "sandbox": ("muster.v1.SandboxService", _unary(host)),
        }


def _unary(methods: dict[str, Handler]) -> dict[str, Any]:
    made: Any = grpc.unary_unary_rpc_method_handler
    return {name: made(method) for name, method in methods.items()}


def reply(codec: HfChatCodec, tokens: int) -> list[int]:
    """A bash block of about so many tokens, closed as the model closes its turn."""
    text, ids = "true", list[int]()
    while len(ids) < tokens - 1:
        text += "\necho step"
        ids = codec.encode(f"```bash\n{text}\n```", special=False)
    return [*ids, codec.stop_ids[0]]


async def serve(args: argparse.Namespace) -> None:
    """Until SIGTERM."""
    fakes = Fakes(
        HfChatCodec(args.model),
        think_s=args.think_ms / 1000,
        reply_tokens=args.reply_tokens,
        output_bytes=args.output_bytes,
    )
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    async with (
        streams.connect(RedisConfig(url=args.redis, allow_volatile=True)) as redis,
        AsyncExitStack() as stack,
        asyncio.TaskGroup() as tasks,
    ):
        following = tasks.create_task(follow(redis, args.run, "0-0", fakes.follow), name="follow")
        registry = Registry(redis, args.run)
        for kind, (name, methods) in fakes.services().items():
            for number in range(args.replicas if kind == "inference" else args.hosts):
                server = grpc.aio.server(options=_OPTIONS)
                server.add_generic_rpc_handlers(
                    (grpc.method_handlers_generic_handler(name, methods),)
                )
                port = server.add_insecure_port("127.0.0.1:0")
                await server.start()
                stack.push_async_callback(server.stop, 0)
                address = f"127.0.0.1:{port}"
                await stack.enter_async_context(
                    registry.announce(kind, f"{kind}-{number}", address)
                )
        await stopping.wait()
        await end(following)


def main() -> None:
    import uvloop

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--redis", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--think-ms", type=float, default=50.0)
    parser.add_argument("--reply-tokens", type=int, default=214)
    parser.add_argument("--output-bytes", type=int, default=1800)
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
