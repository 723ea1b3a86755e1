"""Weights from one process to an engine in another while it decodes: does the line work here?

    python scripts/nccl_check.py [--backend nccl|gloo] [--engine vllm|fake] [--model NAME]
        [--rounds N]

Prints, for each publication, its latency, the pause of the engine, the longest gap between tokens
and the tokens lost; that every token sampled meanwhile is in exactly one version's span; and what a
sender that is killed in the middle of its broadcast leaves behind: how long the engine waits for it
(at most the deadline), what it serves then, and whether the next publication succeeds. Exit status
1 when something does not hold. `nccl` needs a GPU that both processes may use, or two; with `gloo`
the script itself is tried on any machine. **`--backend nccl` has not yet been run on hardware.**
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muster import codec, rpc
from muster.clock import monotonic
from muster.model import ensure_model
from muster.transfer.publisher import ReplicaPublication, TransferSettings, publish
from muster.transfer.snapshot import Snapshot
from muster.types import SamplingParams
from muster.v1 import common_pb2 as common
from muster.v1 import inference_pb2 as pb
from muster.v1.inference_pb2_grpc import (
    InferenceServiceStub,
    add_InferenceServiceServicer_to_server,
)

RUN, DEADLINE_S, GRACE_S = "check", 20.0, 5.0
STREAMS, TOKENS = 4, 250
_THIS = str(Path(__file__).resolve())


@dataclass
class Options:
    """The command line."""

    backend: str = "nccl"
    engine: str = "vllm"
    model: str = "smollm2-135m-instruct"
    rounds: int = 5
    replica: bool = False
    sender: str = ""  # address of the replica: a child that publishes slowly, to be killed
    version: int = 0


@dataclass
class Decoded:
    """What the streams got."""

    tokens: int = 0
    spanned: int = 0
    versions: set[int] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


# The engine's process ------------------------------------------------------------------------


async def serve(options: Options) -> None:
    """A child's whole life: until its input is closed."""
    from services.inference.config import InferenceConfig
    from services.inference.driver import ReplicaDriver
    from services.inference.engine import Engine
    from services.inference.replica import Bounds, Replica
    from services.inference.server import InferenceServicer

    engine: Engine
    if options.engine == "fake":
        from services.inference.adapters.fake import FakeEngine, Script
        from services.inference.adapters.receive import receive_and_verify

        engine = FakeEngine(Script(length=4096, step_s=0.04), receive=receive_and_verify)
    else:
        from services.inference.adapters.vllm import VllmEngine

        config = InferenceConfig(kv_cache_gib=0.5, max_requests=STREAMS + 2)
        engine = VllmEngine(str(_folder(options)), config)
    bounds = Bounds(requests_max=STREAMS + 2, scores_max=2, tokens_max=2048)
    async with ReplicaDriver(Replica(RUN, bounds), engine, receive_timeout_s=120.0) as driver:
        await driver.start(0)
        services = [(add_InferenceServiceServicer_to_server, InferenceServicer("one", driver))]
        async with rpc.serve("127.0.0.1:0", services) as server:
            _say(f"address {server.address}")
            await asyncio.to_thread(sys.stdin.read)


@asynccontextmanager
async def child(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """This script once more, in a process group of its own that ends with the block."""
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, _THIS, *arguments)
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


# The trainer's process -----------------------------------------------------------------------


def _folder(options: Options) -> Path:
    return ensure_model(options.model, Path(os.environ.get("MUSTER_CACHE", ".muster/cache")))


def snapshot_of(options: Options) -> Snapshot:
    """The weights that travel, as version 1."""
    if options.engine == "fake":
        import torch

        state: dict[str, Any] = {f"w{n}": torch.ones(1024, 2048) for n in range(8)}
    else:
        from safetensors.torch import load_file

        state = load_file(_folder(options) / "model.safetensors")
    return Snapshot.take(state, version=1, parent=0)


async def send(options: Options, snapshot: Snapshot, address: str, *, slow: bool = False) -> Any:
    """One publication of `options.version`; slow: it takes about ten seconds."""
    rate = snapshot.manifest.bytes_total / 10.0 if slow else 0.0
    settings = TransferSettings(
        backend=options.backend, timeout_s=DEADLINE_S, call_timeout_s=10.0, bytes_per_s=rate
    )
    version = options.version
    (report,) = await publish(
        snapshot.renamed(version, version - 1),
        run=RUN,
        trainer_epoch=1,
        replicas=[("one", address)],
        settings=settings,
    )
    return report


async def decode(address: str, name: int, into: Decoded) -> None:
    """One request from beginning to end, while versions come."""
    request = pb.GenerateRequest(
        episode=common.EpisodeKey(run=RUN, group=f"g{name}", owner_epoch=1),
        request_id=f"r{name}",
        prompt_token_ids=codec.pack_ids(range(200, 260)),
        sampling=codec.sampling_to_pb(SamplingParams(temperature=1.0, seed=name)),
        max_tokens=TOKENS,
    )
    async with rpc.channel(address) as channel:
        call = InferenceServiceStub(channel).Generate(request, timeout=600)
        try:
            async for message in call:
                into.tokens += len(codec.unpack_ids(message.token_ids))
                if message.HasField("finish"):
                    spans = codec.spans_from_pb(message.finish.spans)
                    into.spanned += sum(span.end - span.start for span in spans)
                    into.versions |= {span.version for span in spans}
        finally:
            call.cancel()


async def status(address: str) -> pb.GetReplicaStatusResponse:
    async with rpc.channel(address) as channel:
        stub = InferenceServiceStub(channel)
        return await stub.GetReplicaStatus(pb.GetReplicaStatusRequest(), timeout=10)


async def publications(options: Options, snapshot: Snapshot, address: str) -> list[str]:
    """Rounds of them under decoding streams; what did not hold."""
    problems, decoded = list[str](), Decoded()
    async with asyncio.TaskGroup() as tasks:
        for name in range(STREAMS):
            tasks.create_task(decode(address, name, decoded), name=f"decode-{name}")
        await asyncio.sleep(1.0)
        for _ in range(options.rounds):
            options.version += 1
            report: ReplicaPublication = await send(options, snapshot, address)
            _say(
                f"version {options.version}: latency {report.latency_s:.3f} s, pause "
                f"{report.pause_s:.3f} s, token gap {report.token_gap_s:.3f} s, tokens lost "
                f"{report.tokens_lost}, computed again {report.requests_recomputed}"
                + (f", FAILED: {report.error}" if report.error else "")
            )
            problems += [report.error] if report.error else []
            await asyncio.sleep(0.3)
    _say(f"{decoded.tokens} tokens sampled, {decoded.spanned} in spans of {decoded.versions}")
    if decoded.tokens != decoded.spanned or decoded.tokens != STREAMS * TOKENS:
        problems.append("the tokens of the spans do not add up")
    return problems


async def killed_sender(options: Options, snapshot: Snapshot, address: str) -> list[str]:
    """A sender is killed in the middle; what did not hold."""
    problems, before = list[str](), options.version
    arguments = ["--backend", options.backend, "--engine", options.engine, "--model", options.model]
    sending = ("--sender", address, "--version", str(before + 1))
    async with child(*arguments, *sending) as sender:
        await _until(address, pb.UPDATE_PHASE_RECEIVING, 300.0)
        await asyncio.sleep(2.0)
        os.killpg(sender.pid, signal.SIGKILL)
        killed = monotonic()
    await _until(address, pb.UPDATE_PHASE_FAILED, DEADLINE_S + GRACE_S)
    waited, at = monotonic() - killed, await status(address)
    _say(
        f"sender killed mid-broadcast: the engine gave up after {waited:.1f} s "
        f"(deadline {DEADLINE_S:.0f} s) and serves version {at.version}"
    )
    if at.version != before or at.state != pb.REPLICA_STATE_SERVING:
        problems.append("the engine does not serve the version that it served before")
    options.version = before + 2
    report = await send(options, snapshot, address)
    _say(f"the next publication: {report.error or f'served after {report.latency_s:.3f} s'}")
    return problems + ([report.error] if report.error else [])


async def _until(address: str, phase: int, limit_s: float) -> None:
    async with asyncio.timeout(limit_s):
        while (await status(address)).update_phase != phase:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)


async def check(options: Options) -> list[str]:
    """Everything; what did not hold."""
    snapshot = await asyncio.to_thread(snapshot_of, options)
    _say(f"{options.backend}, {options.engine}: {snapshot.manifest.bytes_total / 1e6:.0f} MB")
    own = ("--replica", "--engine", options.engine, "--model", options.model)
    async with child(*own) as replica:
        assert replica.stdout is not None
        address = ""
        async with asyncio.timeout(600.0):
            while not address and (line := await replica.stdout.readline()):
                word, _, rest = line.decode().strip().partition(" ")
                address = rest if word == "address" else ""
        if not address:
            return ["the engine did not start"]
        found = await publications(options, snapshot, address)
        return found + await killed_sender(options, snapshot, address)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--engine", choices=("vllm", "fake"), default="vllm")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--replica", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--sender", default="", help=argparse.SUPPRESS)
    parser.add_argument("--version", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(namespace=Options())
    if options.replica:
        asyncio.run(serve(options))
        return 0
    if options.sender:
        asyncio.run(send(options, snapshot_of(options), options.sender, slow=True))
        return 0
    problems = asyncio.run(check(options))
    _say("all held" if not problems else "; ".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
