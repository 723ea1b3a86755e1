"""How long boxes take, through gRPC, against a bare clone + overlay + exec of the same command.

    python -m bench.sandbox [--quick] [--json PATH] [--rootfs TAR] [--swe-rex]

The service runs in a process of its own, as in production, the client in this one. Both arms run in
turns within each round, one box at a time and many at once. With --rootfs (a tarball of a root file
system with bash) boxes from it stand beside containers of the Docker API from it; with --swe-rex
SWE-ReX's local runtime does, installed by pip into an environment of its own. Needs root.
bench/sandbox_table.py makes docs/results/sandbox.md of the JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from bench import _bare, _results
from bench._box_arm import Boxes, Times
from bench._box_service import service
from bench._docker_api import Containers, NoEngine, containers
from muster.clock import monotonic

# What is measured, and what stands against it: the command and the layer of the bare run.
CONTROLS = {
    "start": ("true", "fresh"),
    "fork": ("true", "fork"),
    "warm": ("true", "fresh"),
    "step_bash": (_bare.BASH, "fresh"),
    "step_python": (_bare.PYTHON, "fresh"),
    "kill": (_bare.TREE, "kill"),
    "verify": (_bare.VERIFY, "fresh"),
}
STEPS = ("step_bash", "step_python")  # these stand against a bare exec without a layer as well
OPERATIONS = (*CONTROLS, "release", "end")
_IMAGE = "muster-bench/rootfs"
_BESIDE = ("start", "step_bash", "end")


class Bare:
    """The control, in a process of its own."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench._bare"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self._read() != "ready\n":
            raise SystemExit("the control did not start")

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def batch(self, at_once: int, times: Times) -> None:
        """The commands of one batch of boxes, each in a fresh layer."""
        for name, (command, layer) in CONTROLS.items():
            times[name] += self._ask({"command": command, "at_once": at_once, "layer": layer})
        for name in STEPS:
            asked = {"command": CONTROLS[name][0], "at_once": at_once, "layer": "none"}
            times[f"exec_{name}"] += self._ask(asked)

    def _ask(self, request: dict[str, Any]) -> list[float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        took: list[float] = json.loads(self._read())
        return took

    def close(self) -> None:
        """It ends with its stdin."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


class Found:
    """Everything measured: (arm, boxes at once) → operation → milliseconds."""

    def __init__(self) -> None:
        self.times: dict[tuple[str, int], Times] = defaultdict(lambda: defaultdict(list))
        self.failed = self.started = 0
        self.beside: dict[str, Times] = {}
        self.not_beside: dict[str, str] = {}


async def measure(asked: argparse.Namespace, rounds: int, alone: int, at_once: int) -> Found:
    """Both arms, and what stands beside them."""
    found = Found()
    bases = {_IMAGE: str(asked.rootfs.resolve())} if asked.rootfs else {}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-bench-")))
        # Twice: those in use, and those that stand ready.
        channel = await stack.enter_async_context(service(folder, 2 * at_once + 8, bases))
        boxes, bare = Boxes(channel), Bare()
        await boxes.prepare()
        await asyncio.to_thread(bare.batch, 1, defaultdict(list))
        for _ in range(rounds):
            for number in range(alone):
                arms = ("boxes", "bare") if number % 2 else ("bare", "boxes")
                for arm in arms:
                    await _batch(boxes, bare, arm, 1, found)
            for arm in ("boxes", "bare"):
                await _batch(boxes, bare, arm, at_once, found)
        await asyncio.to_thread(bare.close)
        await _docker(boxes, asked.rootfs, rounds * 5, found)
        found.failed, found.started = boxes.failed, boxes.started
    await _swe_rex(asked.swe_rex, rounds * 5, found)
    return found


async def _batch(boxes: Boxes, bare: Bare, arm: str, at_once: int, found: Found) -> None:
    times = found.times[arm, at_once]
    if arm == "boxes":
        await boxes.batch(at_once, times)
    else:
        await asyncio.to_thread(bare.batch, at_once, times)


async def _docker(boxes: Boxes, rootfs: Path | None, rounds: int, found: Found) -> None:
    """Boxes and containers of the same root file system, in turns."""
    try:
        async with containers(rootfs) as others:
            ours: Times = defaultdict(list)
            theirs: Times = defaultdict(list)
            await _pair(boxes, others, defaultdict(list), defaultdict(list))  # caches
            for _ in range(rounds):
                await _pair(boxes, others, ours, theirs)
            found.beside |= {"docker": theirs, "boxes_of_rootfs": ours}
    except NoEngine as why:
        found.not_beside["docker"] = str(why)


async def _pair(boxes: Boxes, others: Containers, ours: Times, theirs: Times) -> None:
    await others.batch(theirs)
    await boxes.steps(_IMAGE, ours)


async def _swe_rex(asked: bool, rounds: int, found: Found) -> None:
    """In an environment made for it, which is gone afterwards."""
    if not asked:
        found.not_beside["swe_rex"] = "not asked for (--swe-rex)"
        return
    with tempfile.TemporaryDirectory(prefix="muster-swe-rex-") as folder:
        python = f"{folder}/bin/python"
        for command in (
            [sys.executable, "-m", "venv", folder],
            [python, "-m", "pip", "install", "-q", "swe-rex"],
            [python, str(Path(__file__).with_name("_swe_rex.py")), str(rounds)],
        ):
            done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
            if done.returncode:
                said = done.stderr.strip().splitlines() or ["without a word"]
                found.not_beside["swe_rex"] = f"{' '.join(command[1:4])} failed: {said[-1]}"
                return
    found.beside["swe_rex"] = defaultdict(list, json.loads(done.stdout))


def result_of(
    found: Found, at_once: int, machine: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The result as bench/_results.py has it."""
    result: dict[str, Any] = {
        "name": "sandbox",
        "machine": {**machine, "load_1m_after": round(os.getloadavg()[0], 2)},
        "settings": {**settings, "service": "own process", "client": "one process, asyncio"},
        "figures": {"boxes_started": found.started, "failed_starts": found.failed},
        "ratios": {},
        "not_beside": found.not_beside,
    }
    for load, name in ((1, "alone"), (at_once, "at_once")):
        boxes, bare = found.times["boxes", load], found.times["bare", load]
        result["figures"][f"warm_share_{name}"] = round(min(boxes["warm_share"]), 3)
        for q, label in ((0.5, "p50"), (0.99, "p99")):
            _compare(boxes, bare, q, f"{name}_{label}", result)
    for arm, times in found.beside.items():
        for operation in _BESIDE:
            name = f"{arm}_{operation}_p50_ms"
            if times[operation]:
                result["figures"][name] = round(_results.quantile(times[operation], 0.5), 3)
    _beside(found, result)
    return result


def _compare(boxes: Times, bare: Times, q: float, label: str, result: dict[str, Any]) -> None:
    """Each operation's figure, those of its controls, and their ratios."""
    for operation in OPERATIONS:
        ours = _results.quantile(boxes[operation], q)
        result["figures"][f"{operation}_{label}_ms"] = round(ours, 3)
        for control, prefix in ((operation, "bare"), (f"exec_{operation}", "bare_exec")):
            if control in bare:
                theirs = _results.quantile(bare[control], q)
                result["figures"][f"{prefix}_{operation}_{label}_ms"] = round(theirs, 3)
                result["ratios"][f"{operation}_over_{prefix}_{label}"] = round(ours / theirs, 3)


def _beside(found: Found, result: dict[str, Any]) -> None:
    """How many times as long the others take."""
    pairs = {"docker": "boxes_of_rootfs", "swe_rex": "alone"}
    for arm, ours in pairs.items():
        if arm not in found.beside:
            continue
        for operation in ("start", "step_bash"):
            own = found.beside.get(ours, found.times["boxes", 1])[operation]
            theirs = _results.quantile(found.beside[arm][operation], 0.5)
            ratio = theirs / _results.quantile(own, 0.5)
            result["ratios"][f"{arm}_over_boxes_{operation}_p50"] = round(ratio, 3)


def main() -> None:
    parser = _results.parser(__doc__ or "")
    parser.add_argument("--rootfs", type=Path, metavar="TAR", help="for the Docker API beside it")
    parser.add_argument("--swe-rex", action="store_true", help="SWE-ReX beside it")
    parser.add_argument("--at-once", type=int, metavar="N", help="boxes at once; usually 64 (16)")
    asked = parser.parse_args()
    rounds, alone, at_once = (2, 3, 16) if asked.quick else (5, 30, 64)
    at_once = asked.at_once or at_once
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started is ended then too
    began, machine = monotonic(), _results.machine()
    found = asyncio.run(measure(asked, rounds, alone, at_once))
    settings = {
        "quick": asked.quick,
        "rounds": rounds,
        "boxes_alone_per_round": alone,
        "boxes_at_once": at_once,
        "seconds": round(monotonic() - began),
    }
    result = result_of(found, at_once, machine, settings)
    _results.publish(result, asked.json)
    for other, why in found.not_beside.items():
        print(f"not beside it: {other}: {why}", file=sys.stderr)


if __name__ == "__main__":
    main()
