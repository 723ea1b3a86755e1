"""The engine's output head in float32 against the model's own type: how near, and what it costs.

    python -m bench.engine_head [--quick] [--json PATH|-]

Two engines of one model, one with `inference.head_dtype = "float32"`, one with "model", take turns:
in each round both sample the same batch. Then the trainer scores what each of them sampled, with
its own head in float32 and in the model's type, at the same weights.

Figures: per engine and trainer head, over all sampled tokens: mean_abs (mean |Δ log-probability|)
and its standard error, k3 per token, max_abs; tokens per second of wall time, and per second of
processor time of the engine's processes, median of the rounds. Ratios: float32 over model, of the
medians. On a machine that others use, only the processor time means anything.

The model is MUSTER_TEST_MODEL or the bundled one, from MUSTER_CACHE or .muster/cache. Does not
cover: GPUs (not yet run on hardware).
"""

from __future__ import annotations

import asyncio
import math
import os
import statistics
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch

from bench import _results
from muster.layout import lay_out
from muster.leased import Trajectory
from muster.model import ensure_model
from muster.types import (
    Outcome,
    OutcomeLabel,
    SamplingParams,
    Segment,
    SegmentKind,
    VersionSpan,
)
from services.inference.adapters.vllm import VllmEngine
from services.inference.config import InferenceConfig
from services.inference.engine import Chunk, Sampling
from services.router.adapters.tokenizer import HfChatCodec
from services.router.conversation import rendered
from services.router.events import Message
from services.trainer.adapters.model_files import load_model
from services.trainer.adapters.torch_forward import Scorer
from services.trainer.adapters.torch_head import HeadSettings
from services.trainer.packing import pack

TEMPERATURE = 0.7
BATCH, TOKENS, ROUNDS, QUICK_ROUNDS = 8, 128, 8, 2
ASKED = (
    "Write the numbers from one to ten into a file, one on each line.",
    "Which files in this folder are larger than one megabyte?",
    "Explain what a hash table is, in three sentences.",
    "Rename every .txt file in this folder to .md.",
    "Tell a short story about a lighthouse keeper.",
    "What does `sort | uniq -c` print?",
    "Find the process that listens on port 8080.",
    "Why is the sky blue?",
)
HeadDtype = Literal["float32", "model"]
_PARENT, _USER_TICKS = 1, 11  # of _fields
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
ENGINES: tuple[HeadDtype, ...] = ("float32", "model")


@dataclass
class Sampled:
    """One reply, with what the engine said of it."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()


@dataclass
class Arm:
    """One engine and its rounds."""

    engine: VllmEngine
    processes: frozenset[int]
    replies: list[Sampled] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)  # tokens per second
    cpu: list[float] = field(default_factory=list)  # tokens per processor second

    def spent(self) -> float:
        """Processor seconds of its processes."""
        ticks = 0
        for pid in self.processes:
            fields = _fields(pid)
            ticks += int(fields[_USER_TICKS]) + int(fields[_USER_TICKS + 1])
        return ticks * _TICK_S


async def started(dtype: HeadDtype, folder: Path) -> Arm:
    before = _below(os.getpid())
    engine = VllmEngine(
        str(folder), InferenceConfig(head_dtype=dtype, kv_cache_gib=0.125, max_requests=BATCH)
    )
    await engine.start(0)
    return Arm(engine, _below(os.getpid()) - before)


def _fields(pid: int) -> list[str]:
    """Of /proc/PID/stat, from the state on."""
    return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()


def _below(pid: int) -> frozenset[int]:
    """All processes that this one and its children started."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # it has just ended
                parents[int(entry.name)] = int(_fields(int(entry.name))[_PARENT])
    found: set[int] = set()
    while new := {child for child, parent in parents.items() if parent in found | {pid}} - found:
        found |= new
    return frozenset(found)


async def reply(engine: VllmEngine, name: str, prompt: tuple[int, ...], seed: int) -> Sampled:
    params = SamplingParams(temperature=TEMPERATURE, seed=seed)
    found = Sampled(prompt)
    async for item in engine.sample(Sampling(name, prompt, params, TOKENS)):
        if isinstance(item, Chunk):
            found.ids += item.token_ids
            found.logprobs += item.logprobs
    return found


async def run_round(arm: Arm, prompts: list[tuple[int, ...]], number: int) -> None:
    """All prompts at once, each with a seed of its own in every round."""
    began, before = perf_counter(), arm.spent()
    async with asyncio.TaskGroup() as tasks:
        work = [
            tasks.create_task(reply(arm.engine, f"{number}.{n}", prompt, number * len(prompts) + n))
            for n, prompt in enumerate(prompts)
        ]
    replies = [one.result() for one in work]
    tokens = sum(len(one.ids) for one in replies)
    arm.wall.append(tokens / (perf_counter() - began))
    arm.cpu.append(tokens / (arm.spent() - before))
    arm.replies += replies


def differences(scorer: Scorer, replies: list[Sampled]) -> list[float]:
    """Trainer − engine, token by token."""
    label = OutcomeLabel(Outcome.MODEL_SUCCESS, "bench", 1.0)
    sampling = SamplingParams(temperature=TEMPERATURE)
    found: list[float] = []
    for number, one in enumerate(replies):
        spans = (VersionSpan(0, 0, len(one.ids), 0),)
        segments = (
            Segment(SegmentKind.PROMPT, one.prompt),
            Segment(SegmentKind.MODEL, one.ids, one.logprobs, spans),
        )
        sequences = lay_out(0, Trajectory("g", "t", number, 0, label, segments, sampling))
        with torch.no_grad():
            for row in pack(sequences, tokens_max=4096):
                heat = torch.full((len(row.picks),), TEMPERATURE)
                values = scorer.logprobs(row, heat).tolist()
                found += [a - b for a, b in zip(values, one.logprobs, strict=True)]
    return found


def told(prefix: str, deltas: list[float]) -> dict[str, float]:
    sizes = [abs(d) for d in deltas]
    return {
        f"{prefix}_mean_abs": statistics.fmean(sizes),
        f"{prefix}_mean_abs_stderr": statistics.stdev(sizes) / math.sqrt(len(sizes)),
        f"{prefix}_k3": statistics.fmean(math.exp(d) - 1 - d for d in deltas),
        f"{prefix}_max_abs": max(sizes),
    }


async def sample(folder: Path, rounds: int) -> dict[HeadDtype, Arm]:
    """Rounds of both engines in turn, after one round that counts for neither."""
    codec = HfChatCodec(folder)
    prompts = [rendered(codec, (Message("user", text),)) for text in ASKED]
    async with AsyncExitStack() as stack:
        arms: dict[HeadDtype, Arm] = {}
        for dtype in ENGINES:
            arms[dtype] = await started(dtype, folder)
            stack.push_async_callback(arms[dtype].engine.shutdown)
        for number in range(rounds + 1):
            for dtype in ENGINES if number % 2 else ENGINES[::-1]:
                await run_round(arms[dtype], prompts, number)
            if number == 0:
                for arm in arms.values():
                    arm.replies, arm.wall, arm.cpu = [], [], []
        return arms


def main() -> None:
    """Sample, then score."""
    asked = _results.arguments("The engine's head in float32 against the model's own type")
    rounds = QUICK_ROUNDS if asked.quick else ROUNDS
    machine = _results.machine()
    folder = ensure_model(
        os.environ.get("MUSTER_TEST_MODEL", "smollm2-135m-instruct"),
        Path(os.environ.get("MUSTER_CACHE", ".muster/cache")),
    )
    arms = asyncio.run(sample(folder, rounds))
    model = load_model(folder, torch.bfloat16).eval()
    figures: dict[str, float] = {"rounds": rounds}
    for dtype, arm in arms.items():
        figures[f"{dtype}_tokens"] = sum(len(one.ids) for one in arm.replies)
        figures[f"{dtype}_tokens_per_s"] = statistics.median(arm.wall)
        figures[f"{dtype}_tokens_per_cpu_s"] = statistics.median(arm.cpu)
        for head in ("float32", "bfloat16"):
            scorer = Scorer(model, HeadSettings(dtype=head))
            figures |= told(f"{dtype}_trainer_{head}", differences(scorer, arm.replies))
    ratios = {
        "float32_over_model_tokens_per_s": figures["float32_tokens_per_s"]
        / figures["model_tokens_per_s"],
        "float32_over_model_tokens_per_cpu_s": figures["float32_tokens_per_cpu_s"]
        / figures["model_tokens_per_cpu_s"],
    }
    settings = {"quick": asked.quick, "batch": BATCH, "tokens": TOKENS, "temperature": TEMPERATURE}
    result: dict[str, Any] = {
        "name": "engine_head",
        "machine": machine,
        "settings": settings,
        "figures": figures,
        "ratios": ratios,
    }
    _results.publish(result, asked.json)


if __name__ == "__main__":
    main()
