"""Publications while an engine decodes: pauses, tokens, memory, and a sender that is killed.

    python -m bench.publication_live [--backend gloo|nccl] [--engine vllm|fake] [--model NAME]
        [--rounds N] [--active recompute|keep|finish|abort] [--json PATH]

The engine is another process, behind its service's own driver and gRPC; four streams decode all
along. Prints, for each publication, its latency, the pause of the engine, the longest gap between
tokens and the tokens lost. It fails (exit status 1) when the tokens do not add up (what callers
got = the sum of the versions' spans ≤ what the engine counts, which adds its canaries), when KV of
an older version was used though `keep` was not asked for, or when a sender that is killed in the
middle of its broadcast leaves anything behind: the engine must give up within the deadline, serve
what it served, and take the next version. `nccl` needs a GPU that both processes may use, or two.
**`--backend nccl` has not yet been run on hardware.**
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muster import codec, rpc
from muster.clock import monotonic
from muster.model import ensure_model
from muster.transfer.active import ActiveRequests
from muster.transfer.publisher import ReplicaPublication, TransferSettings, publish
from muster.transfer.snapshot import Snapshot
from muster.types import SamplingParams, VersionSpan
from muster.v1 import common_pb2 as common
from muster.v1 import inference_pb2 as pb
from muster.v1.inference_pb2_grpc import (
    InferenceServiceStub,
    add_InferenceServiceServicer_to_server,
)

RUN, DEADLINE_S, CALL_S, GRACE_S = "check", 60.0, 30.0, 10.0
STREAMS, TOKENS = 4, 250
_THIS = str(Path(__file__).resolve())


@dataclass
class Options:
    """The command line."""

    backend: str = "gloo"
    engine: str = "vllm"
    model: str = "smollm2-135m-instruct"
    rounds: int = 20
    active: str = "recompute"
    json: str = ""
    replica: bool = False
    sender: str = ""  # address of the replica: a child that publishes slowly, to be killed
    version: int = 0


@dataclass
class Decoded:
    """What the streams got."""

    tokens: int = 0
    by_version: Counter[int] = field(default_factory=Counter)  # by the spans
    on_older_kv: int = 0
    requests: int = 0
    aborted: int = 0


# The engine's process ------------------------------------------------------------------------


async def serve(options: Options, until: Callable[[Any], Awaitable[object]] | None = None) -> None:
    """A child's whole life: until its input is closed, or `until`, told the engine, is over."""
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
            await (until(engine) if until else asyncio.to_thread(sys.stdin.read))


@asynccontextmanager
async def child(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """This script once more, in a process group of its own that ends with the block."""
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, _THIS, *arguments)
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, process_group=0
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
        backend=options.backend,
        timeout_s=DEADLINE_S,
        call_timeout_s=CALL_S,
        bytes_per_s=rate,
        active=ActiveRequests(options.active),
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


async def decode(address: str, name: int, into: Decoded, over: asyncio.Event) -> None:
    """One request after the other, while versions come."""
    async with rpc.channel(address) as channel:
        while not over.is_set():
            into.requests += 1
            request = pb.GenerateRequest(
                episode=common.EpisodeKey(run=RUN, group=f"g{name}", owner_epoch=1),
                request_id=f"r{name}.{into.requests}",
                prompt_token_ids=codec.pack_ids(range(200, 260)),
                sampling=codec.sampling_to_pb(SamplingParams(temperature=1.0, seed=name)),
                max_tokens=TOKENS,
            )
            call = InferenceServiceStub(channel).Generate(request, timeout=600)
            try:
                async for message in call:
                    into.tokens += len(codec.unpack_ids(message.token_ids))
                    if message.HasField("finish"):
                        _count(codec.spans_from_pb(message.finish.spans), into)
                        into.aborted += message.finish.reason == pb.FINISH_REASON_ABORT
            finally:
                call.cancel()


def _count(spans: Sequence[VersionSpan], into: Decoded) -> None:
    for span in spans:
        into.by_version[span.version] += span.end - span.start
        if span.kv_min_version < span.version:
            into.on_older_kv += span.end - span.start


def resident_mb(leader: int) -> float:
    """Memory of a session's processes, pages that they share counted in each."""
    pages = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            fields = (folder / "stat").read_text("ascii").rpartition(")")[2].split()
            if int(fields[3]) == leader:
                pages += int(fields[21])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def status(address: str) -> pb.GetReplicaStatusResponse:
    async with rpc.channel(address) as channel:
        stub = InferenceServiceStub(channel)
        return await stub.GetReplicaStatus(pb.GetReplicaStatusRequest(), timeout=CALL_S)


async def publications(
    options: Options, snapshot: Snapshot, address: str, leader: int
) -> tuple[list[str], dict[str, Any]]:
    """Rounds of them under decoding streams: what did not hold, and the figures."""
    problems, decoded, over = list[str](), Decoded(), asyncio.Event()
    reports, memory = list[ReplicaPublication](), list[float]()
    before = (await status(address)).tokens_generated
    async with asyncio.TaskGroup() as tasks:
        for name in range(STREAMS):
            tasks.create_task(decode(address, name, decoded, over), name=f"decode-{name}")
        await asyncio.sleep(1.0)
        for _ in range(options.rounds):
            options.version += 1
            reports.append(await send(options, snapshot, address))
            memory.append(await asyncio.to_thread(resident_mb, leader))
            _say(_told(options.version, reports[-1], memory[-1]))
            await asyncio.sleep(0.5)
        over.set()
    counted = (await status(address)).tokens_generated - before
    spanned = decoded.by_version.total()
    _say(
        f"{decoded.requests} requests, {decoded.aborted} aborted; {decoded.tokens} tokens got, "
        f"{spanned} in spans, {counted} counted by the engine; {decoded.on_older_kv} on older KV"
    )
    _say(
        "tokens by version: "
        + ", ".join(f"{v}: {n}" for v, n in sorted(decoded.by_version.items()))
    )
    problems += [report.error for report in reports if report.error]
    if not decoded.tokens == spanned <= counted:
        problems.append("the tokens do not add up")
    if decoded.on_older_kv and options.active != "keep":
        problems.append("KV of an older version was used, and nobody asked for that")
    return problems, {
        "latency_s_p50": statistics.median(r.latency_s for r in reports),
        "pause_s_p50": statistics.median(r.pause_s for r in reports),
        "pause_s_max": max(r.pause_s for r in reports),
        "token_gap_s_max": max(r.token_gap_s for r in reports),
        "tokens_lost": sum(r.tokens_lost for r in reports),
        "requests_recomputed": sum(r.requests_recomputed for r in reports),
        "requests_kept": sum(r.requests_kept for r in reports),
        "tokens": decoded.tokens,
        "tokens_counted": counted,
        "tokens_on_older_kv": decoded.on_older_kv,
        "memory_mb_first": memory[0],
        "memory_mb_half": memory[len(memory) // 2],
        "memory_mb_last": memory[-1],
    }


def _told(version: int, report: ReplicaPublication, memory: float) -> str:
    return (
        f"version {version}: latency {report.latency_s:.3f} s, pause {report.pause_s:.3f} s, token "
        f"gap {report.token_gap_s:.3f} s, lost {report.tokens_lost}, computed again "
        f"{report.requests_recomputed}, kept {report.requests_kept}, {memory:.0f} MB"
        + (f", FAILED: {report.error}" if report.error else "")
    )


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


async def check(options: Options) -> tuple[list[str], dict[str, Any]]:
    """Everything: what did not hold, and the figures."""
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
            return ["the engine did not start"], {}
        problems, figures = await publications(options, snapshot, address, replica.pid)
        return problems + await killed_sender(options, snapshot, address), figures


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--engine", choices=("vllm", "fake"), default="vllm")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--active", choices=list(ActiveRequests), default="recompute")
    parser.add_argument("--json", default="", help="a file")
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
    problems, figures = asyncio.run(check(options))
    for name, value in figures.items():
        _say(f"{name:24} {value:14,.3f}")
    _say("all held" if not problems else "; ".join(problems))
    if options.json:
        result = {"name": "publication_live", "settings": vars(options), "figures": figures}
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
