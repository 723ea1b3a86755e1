"""How fast a policy version travels: the publisher against a bare gloo broadcast of as many bytes.

    python -m bench.publication [--quick] [--rounds N] [--replicas N] [--json PATH|-]

Both arms run between the same processes, taking turns (publication, bare, publication, …), with a
fresh group each time. Time of the publication: from "weights ready" (the snapshot is taken, copied
and hashed once per version, `snapshot_s`) until the replica has said that it serves them:
preparing, joining, transfer, digests verified, commit. Time of the bare arm: the
broadcast alone, from joined ranks with memory at hand (the same that publications use) until the
last receiver has answered with one byte. The replicas are the service's own driver and gRPC with
the scripted engine, which receives and verifies and has no weights to apply: this is the figure
with the engine idle. Does not cover: the apply, transfers while an engine decodes, nccl.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from bench._bare_transfer import receive_bare, send_bare
from muster import rpc
from muster.clock import monotonic
from muster.transfer import group as transport
from muster.transfer import manifest as weights
from muster.transfer import wire
from muster.transfer.arriving import Source
from muster.transfer.publisher import ReplicaPublication, TransferSettings, publish
from muster.transfer.receiving import Staging
from muster.transfer.snapshot import Snapshot
from muster.v1 import inference_pb2 as pb
from muster.v1.inference_pb2_grpc import (
    InferenceServiceStub,
    add_InferenceServiceServicer_to_server,
)
from services.inference.adapters.fake import FakeEngine
from services.inference.adapters.receive import receive_and_verify
from services.inference.driver import ReplicaDriver
from services.inference.replica import Bounds, Replica
from services.inference.server import InferenceServicer

STAGING = Staging()  # of a replica: both arms receive into the same memory
RUN, BARE, LIMIT_S = "bench", "bare/", 120.0
# The tensors of SmolLM2-135M in bfloat16: 269 MB.
LAYERS, HIDDEN, KV, INNER, VOCABULARY = 30, 576, 192, 1536, 49152


def policy() -> dict[str, torch.Tensor]:
    """Random weights in the shapes of a small model."""
    made = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (VOCABULARY, HIDDEN), "norm": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"{layer}.q_proj": (HIDDEN, HIDDEN),
            f"{layer}.k_proj": (KV, HIDDEN),
            f"{layer}.v_proj": (KV, HIDDEN),
            f"{layer}.o_proj": (HIDDEN, HIDDEN),
            f"{layer}.gate_proj": (INNER, HIDDEN),
            f"{layer}.up_proj": (INNER, HIDDEN),
            f"{layer}.down_proj": (HIDDEN, INNER),
            f"{layer}.input_norm": (HIDDEN,),
            f"{layer}.post_norm": (HIDDEN,),
        }
    return {n: torch.randn(s, generator=made).to(torch.bfloat16) for n, s in shapes.items()}


# The replica's side ----------------------------------------------------------------------


def receive(manifest: weights.Manifest, spec: Source) -> str:
    """What the scripted engine does with an update: the real thing, or the bare broadcast."""
    if not isinstance(spec, transport.GroupSpec) or not spec.generation.startswith(BARE):
        return receive_and_verify(manifest, spec, STAGING)
    stream = STAGING.take(weights.layout(manifest.tensors)[1])
    stream.zero_()
    receive_bare(spec, stream)
    STAGING.give_back(stream)
    return ""


async def serve_replica() -> None:
    """A child's whole life: until its input is closed."""
    replica = Replica(RUN, Bounds(requests_max=4, scores_max=2, tokens_max=2048))
    engine = FakeEngine(receive=receive)
    async with ReplicaDriver(replica, engine, receive_timeout_s=LIMIT_S) as driver:
        await driver.start(0)
        services = [(add_InferenceServiceServicer_to_server, InferenceServicer("one", driver))]
        async with rpc.serve("127.0.0.1:0", services) as server:
            print(server.address, flush=True)
            await asyncio.to_thread(sys.stdin.read)


@asynccontextmanager
async def replicas(count: int) -> AsyncIterator[list[tuple[str, str]]]:
    """That many children: (name, address)."""
    command = (sys.executable, "-m", "bench.publication", "--replica")
    pipe = asyncio.subprocess.PIPE
    children = [
        await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        for _ in range(count)
    ]
    try:
        lines = [await c.stdout.readline() for c in children if c.stdout]
        yield [(f"replica-{at}", line.decode().strip()) for at, line in enumerate(lines)]
    finally:
        for child in children:
            await child.communicate(b"")  # closes its input: it ends


# The trainer's side ----------------------------------------------------------------------


async def published(
    snapshot: Snapshot,
    version: int,
    members: Sequence[tuple[str, str]],
) -> list[ReplicaPublication]:
    """One publication; raises if a replica did not take it."""
    reports = await publish(
        snapshot.renamed(version, version - 1),
        run=RUN,
        trainer_epoch=1,
        replicas=members,
        settings=TransferSettings(timeout_s=LIMIT_S),
    )
    for report in reports:
        if not report.serving:
            raise SystemExit(f"the publication failed: {report.error}")
    return reports


async def bare(
    stream: torch.Tensor, manifest: weights.Manifest, members: Sequence[tuple[str, str]]
) -> float:
    """Seconds of one bare broadcast to all."""
    size = len(members) + 1
    meeting = transport.Meeting("127.0.0.1", size, timeout_s=LIMIT_S)
    name = f"{BARE}{uuid.uuid4().hex}"
    spec = transport.GroupSpec("gloo", meeting.host, meeting.port, 0, size, name, LIMIT_S)
    async with AsyncExitStack() as stack:
        stubs = [
            InferenceServiceStub(await stack.enter_async_context(rpc.channel(address)))
            for _, address in members
        ]
        for rank, stub in enumerate(stubs, start=1):
            await stub.PrepareWeightUpdate(
                pb.PrepareWeightUpdateRequest(
                    run=RUN,
                    trainer_epoch=1,
                    manifest=wire.manifest_to_pb(manifest),
                    group=wire.group_to_pb(msgspec.structs.replace(spec, rank=rank)),
                ),
                timeout=20,
            )
        seconds = await asyncio.to_thread(send_bare, spec, meeting, stream)
        for stub in stubs:
            await stub.AbortWeightUpdate(
                pb.AbortWeightUpdateRequest(run=RUN, trainer_epoch=1), timeout=20
            )
    return seconds


async def measure(rounds: int, count: int) -> dict[str, Any]:
    """All figures; the first round of each arm warms up and is left out."""
    state = policy()
    began = monotonic()
    snapshot = Snapshot.take(state, version=1, parent=0)
    snapshot_s = monotonic() - began
    manifest, stream = snapshot.manifest, snapshot.stream
    latencies, receives, bares = list[float](), list[float](), list[float]()
    load_before = os.getloadavg()[0]
    async with replicas(count) as members:
        for at in range(rounds + 1):
            reports = await published(snapshot, at + 1, members)
            spare = msgspec.structs.replace(manifest, version=rounds + 2, parent=0)
            seconds = await bare(stream, spare, members)
            if at:
                latencies.append(max(report.latency_s for report in reports))
                receives.append(max(report.receive_s for report in reports))
                bares.append(seconds)
    figures = {"bytes": manifest.bytes_total, "snapshot_s": snapshot_s}
    for name, values in (("publication", latencies), ("receive", receives), ("bare", bares)):
        figures |= spread(f"{name}_s", values)
    rate = manifest.bytes_total / 1e6
    figures["publication_mb_per_s_p50"] = rate / statistics.median(latencies)
    figures["bare_mb_per_s_p50"] = rate / statistics.median(bares)
    paired = [b / p for p, b in zip(latencies, bares, strict=True)]
    return {
        "figures": figures,
        "ratios": {
            "publication_to_bare_bytes_per_s": statistics.median(bares)
            / statistics.median(latencies),
            "publication_to_bare_bytes_per_s_worst_round": min(paired),
            "publication_to_bare_bytes_per_s_best_round": max(paired),
        },
        "load": (load_before, os.getloadavg()[0]),
    }


def spread(name: str, values: list[float]) -> dict[str, float]:
    """Median, fastest, slowest."""
    return {
        f"{name}_p50": statistics.median(values),
        f"{name}_min": min(values),
        f"{name}_max": max(values),
    }


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Plain)
    parser.add_argument("--quick", action="store_true", help="5 rounds: supports no claim")
    parser.add_argument("--rounds", type=int, help="default 20")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--json", help="a file, or - for the standard output")
    parser.add_argument("--replica", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.replica:
        asyncio.run(serve_replica())
        return 0
    rounds = options.rounds or (5 if options.quick else 20)
    found = asyncio.run(measure(rounds, options.replicas))
    load = found.pop("load")
    result = {
        "name": "publication",
        "machine": {
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "load_before": load[0],
            "load_after": load[1],
        },
        "settings": {
            "quick": options.quick,
            "rounds": rounds,
            "replicas": options.replicas,
            "engine": "fake",
            "torch": torch.__version__,
        },
        **found,
    }
    _show(result, sys.stderr if options.json == "-" else sys.stdout)
    text = json.dumps(result, indent=1)
    if options.json == "-":
        print(text)
    elif options.json:
        Path(options.json).write_text(text + "\n")
    return 0


_Plain = argparse.RawDescriptionHelpFormatter


def _show(result: dict[str, Any], file: Any) -> None:
    for name, value in {**result["figures"], **result["ratios"]}.items():
        print(f"{name:48} {value:14,.3f}", file=file)


if __name__ == "__main__":
    sys.exit(main())
