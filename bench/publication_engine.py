"""A publication to a real engine against what it is made of, idle and while the engine generates.

    python -m bench.publication_engine [--quick] [--rounds N] [--model NAME] [--active NAME]
        [--json PATH|-]

One trainer's end and vLLM on the CPU, in processes of their own. Publications, bare gloo
broadcasts of as many bytes between the same two processes and bare applies (vLLM's own reload of
tensors that are there) take turns with the engine idle, then the first two while four requests
decode, of which `--active` says what becomes (default `recompute`). A broadcast is timed as in
bench/publication.py; a publication's bytes per second are those of its transfer in the replica:
joining, receiving, every digest.

Ratios, of medians: bytes per second of publication and bare broadcast, idle and generating; the
longest gap between two tokens of a request in a publication over the bare apply (and the longest of
all); a publication's whole latency with the engine idle over bare broadcast + bare apply. Latency
while generating and tokens lost are told. Does not cover: several replicas, nccl
(bench/publication_live.py has it), correctness (the same).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from bench import _results
from bench._bare_transfer import send_bare
from bench.publication_live import STREAMS, Decoded, Options, decode, serve, snapshot_of
from muster.transfer import group as transport
from muster.transfer.active import ActiveRequests
from muster.transfer.publisher import ReplicaPublication, TransferSettings, publish
from muster.transfer.snapshot import Snapshot

RUN, LIMIT_S, ROUNDS, QUICK_ROUNDS = "check", 120.0, 12, 3
_EXTENSION = "bench._bare_worker.BareExtension"


class Replica:
    """The engine's process: an address, and the verbs of the bare arms."""

    def __init__(self, process: asyncio.subprocess.Process, address: str):
        self._process, self.address = process, address

    async def verb(self, name: str, *arguments: str) -> float:
        """One verb of `BareExtension`; what it answers, 0 when that is nothing."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, *arguments]).encode() + b"\n")
        await self._process.stdin.drain()
        return float(await _told(self._process.stdout, "answer"))


async def _told(lines: asyncio.StreamReader, word: str) -> str:
    """What follows that word; vLLM may print between."""
    async with asyncio.timeout(600.0):
        while line := await lines.readline():
            first, _, rest = line.decode().strip().partition(" ")
            if first == word:
                return rest
    raise SystemExit("the engine's process ended: see above")


@asynccontextmanager
async def replica(model: str) -> AsyncIterator[Replica]:
    """One, in a process group of its own."""
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "bench.publication_engine", "--replica", "--model", model)
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, process_group=0, limit=1 << 20
    )
    try:
        assert process.stdout is not None
        yield Replica(process, await _told(process.stdout, "address"))
    finally:
        if process.stdin is not None:
            process.stdin.close()
        await process.wait()


async def _serve(model: str) -> None:
    """A child's whole life; a line of its input is a verb, and its end the child's."""
    from services.inference.adapters import vllm_setup

    vllm_setup._EXTENSION = _EXTENSION

    async def verbs(engine: Any) -> None:
        while line := await asyncio.to_thread(sys.stdin.readline):
            name, *arguments = json.loads(line)
            (answer,) = await engine._llm.collective_rpc(name, args=tuple(arguments))
            print("answer", answer or 0.0, flush=True)

    await serve(Options(model=model), until=verbs)


# The trainer's side ----------------------------------------------------------------------


async def bare(snapshot: Snapshot, to: Replica) -> float:
    """Seconds of one bare broadcast."""
    meeting = transport.Meeting("127.0.0.1", 2, timeout_s=LIMIT_S)
    name = uuid.uuid4().hex
    spec = transport.GroupSpec("gloo", meeting.host, meeting.port, 0, 2, name, LIMIT_S)
    theirs = msgspec.structs.replace(spec, rank=1)
    await to.verb("bench_receive", *map(_text, (snapshot.manifest, theirs)))
    return await asyncio.to_thread(send_bare, spec, meeting, snapshot.stream)


class Rounds:
    """Publications, bare broadcasts and, of an idle engine, bare applies in turns; the first of
    each warms up and is left out."""

    def __init__(self, snapshot: Snapshot, to: Replica, active: ActiveRequests):
        self._snapshot, self._to, self._version = snapshot, to, 0
        self._settings = TransferSettings(timeout_s=LIMIT_S, active=active)

    async def take(
        self, rounds: int, *, idle: bool
    ) -> tuple[list[ReplicaPublication], list[float], list[float]]:
        """So many of each: publications, broadcasts, applies."""
        reports, bares, applies = list[ReplicaPublication](), list[float](), list[float]()
        for _ in range(rounds + 1):
            self._version += 1
            (report,) = await publish(
                self._snapshot.renamed(self._version, self._version - 1),
                run=RUN,
                trainer_epoch=1,
                replicas=[("one", self._to.address)],
                settings=self._settings,
            )
            if not report.serving:
                raise SystemExit(f"the publication failed: {report.error}")
            reports.append(report)
            bares.append(await bare(self._snapshot, self._to))
            if idle:
                manifest = _text(self._snapshot.manifest)
                applies.append(await self._to.verb("bench_apply", manifest))
        return reports[1:], bares[1:], applies[1:]


async def measure(rounds: int, model: str, active: ActiveRequests) -> dict[str, Any]:
    """Figures and ratios."""
    snapshot = await asyncio.to_thread(snapshot_of, Options(model=model))
    async with replica(model) as to:
        taken = Rounds(snapshot, to, active)
        idle = await taken.take(rounds, idle=True)
        decoded, over = Decoded(), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for name in range(STREAMS):
                tasks.create_task(decode(to.address, name, decoded, over), name=f"decode-{name}")
            await asyncio.sleep(1.0)  # until they decode
            busy = await taken.take(rounds, idle=False)
            over.set()
    figures = {
        "bytes": float(snapshot.manifest.bytes_total),
        "bare_apply_s": _median(idle[2]),
        "bare_apply_s_min": min(idle[2]),
        "bare_apply_s_max": max(idle[2]),
    }
    for state, (reports, bares, _) in (("idle", idle), ("generating", busy)):
        figures |= {
            f"{state}_latency_s_p50": _median([r.latency_s for r in reports]),
            f"{state}_latency_s_max": max(r.latency_s for r in reports),
            f"{state}_receive_s_p50": _median([r.receive_s for r in reports]),
            f"{state}_pause_s_p50": _median([r.pause_s for r in reports]),
            f"{state}_bare_broadcast_s_p50": _median(bares),
            f"{state}_bare_broadcast_s_max": max(bares),
        }
    gaps = [r.token_gap_s for r in busy[0]]
    figures |= {
        "token_gap_s_p50": _median(gaps),
        "token_gap_s_max": max(gaps),
        "tokens_lost": float(sum(r.tokens_lost for r in busy[0])),
        "tokens": float(decoded.tokens),
    }
    bare_s = figures["idle_bare_broadcast_s_p50"] + figures["bare_apply_s"]
    return {
        "figures": figures,
        "ratios": {
            "idle_to_bare_bytes_per_s": figures["idle_bare_broadcast_s_p50"]
            / figures["idle_receive_s_p50"],
            "generating_to_bare_bytes_per_s": figures["generating_bare_broadcast_s_p50"]
            / figures["generating_receive_s_p50"],
            "token_gap_over_bare_apply": figures["token_gap_s_p50"] / figures["bare_apply_s"],
            "longest_token_gap_over_bare_apply": figures["token_gap_s_max"]
            / figures["bare_apply_s"],
            "idle_latency_over_bare": figures["idle_latency_s_p50"] / bare_s,
        },
    }


def _median(values: list[float]) -> float:
    return statistics.median(values)


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def main() -> int:
    """Entry point."""
    parser = _results.parser(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, help=f"of each kind and state; default {ROUNDS}")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--active", choices=list(ActiveRequests), default="recompute")
    parser.add_argument("--replica", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replica:
        asyncio.run(_serve(options.model))
        return 0
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    machine = _results.machine()
    found = asyncio.run(measure(rounds, options.model, ActiveRequests(options.active)))
    settings = {"quick": options.quick, "rounds": rounds, "model": Path(options.model).name}
    settings |= {"streams": STREAMS, "active": options.active, "torch": torch.__version__}
    machine["load_1m_after"] = round(os.getloadavg()[0], 2)
    result = {"name": "publication_engine", "machine": machine, "settings": settings, **found}
    _results.publish(result, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
