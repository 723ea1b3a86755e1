"""Does a killed sandbox service lose, repeat or leave anything? Many boxes, steps and kills.

    python -m bench.box_soak [--boxes 1000] [--steps 10000] [--kills 50] [--seed 1]
                             [--at-once 12] [--json PATH|-]

A real service of native boxes is asked through gRPC as by a router: boxes are acquired, run steps
by turn, are forked, verified, released, each call repeated until it is answered. Meanwhile the
service is killed with SIGKILL at random moments, now and then again as it starts, and started
again. Each step counts itself in a file of its box and tells the count: a step that ran twice, or
not at all, is a violation, as is a fork that has not its parent's count, a verdict other than 1, a
box told as lost, memory that grows by a tenth over the second half of the steps (judged from 2000
steps on: a service that has just started lacks 10 MiB of what it comes to use), or a process,
mount, cgroup or file that is left at the end. Exit status 1 on any. Needs root.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import random
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from bench import _bank_world as world
from bench import _results
from bench._box_host import Host, host
from muster import codec
from muster.archive import TaskFile, pack_files
from muster.clock import monotonic
from muster.errors import MusterError, NotFound, Unavailable
from muster.rpc import calling
from muster.types import EpisodeKey
from muster.v1 import common_pb2
from muster.v1 import sandbox_pb2 as pb

_POLL_S = 0.5
_CALL_S = 60.0
_PATIENCE_S = 180.0  # for one call to be answered, over all its repeats
_FORKED, _FORK_STEPS, _VERIFIED, _AGAIN = 0.1, 2, 0.5, 0.2
GROWTH_MAX = 0.10  # of the median
_JUDGED_STEPS = 2000
_READ_MIN = 3  # readings that a slope needs
_FILES = {
    "instruction.md": "Count.",
    "environment/Dockerfile": "FROM scratch\nWORKDIR /app\nRUN echo made > made\n",
    "tests/test.sh": 'test "$(wc -l < n)" = "$(cat want)" && echo 1 > /logs/verifier/reward.txt\n',
}


class Lost(Exception):
    """The host told a box as lost."""


class Soak:
    """One run: what is asked, what was answered, and what was wrong with it."""

    def __init__(self, found: Host, boxes: int, steps: int, kills: int, dice: random.Random):
        self.host, self.dice = found, dice
        self.boxes, self.steps, self.kills = boxes, steps, kills
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.restarts_s: list[float] = []
        self.read: list[tuple[int, int, int]] = []  # steps done, KiB of service and keeper
        self.most: Counter[str] = Counter()  # of what is to be gone at the end
        self._numbers = iter(range(boxes))
        archive = pack_files({p: TaskFile(0o644, t.encode()) for p, t in _FILES.items()})
        digest = hashlib.sha256(archive).hexdigest()
        self._task = common_pb2.TaskPackage(name="soak", digest=digest, archive=archive)

    async def run(self, at_once: int) -> None:
        """Everything, until the last box is released and the service has stopped."""
        async with asyncio.TaskGroup() as helpers:
            watching = helpers.create_task(self._watch())
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._kill())
                for _ in range(at_once):
                    tasks.create_task(self._work())
            watching.cancel()
        status = await self.host.stop()
        if status:
            self.wrong.append(f"the service stopped with status {status}")
        await self._look_back()

    async def _call(self, name: str, request: Any) -> Any:
        """Call until there is an answer, of whichever process. Raises Lost."""
        deadline = monotonic() + _PATIENCE_S
        while True:
            stub = await self.host.living()
            try:
                with calling(name):
                    return await getattr(stub, name)(request, timeout=_CALL_S)
            except NotFound as error:
                raise Lost(f"{name}: {error}") from error
            except Unavailable:
                self.counts["repeated calls"] += 1
                if monotonic() > deadline:
                    raise
                await asyncio.sleep(0.05)

    async def _work(self) -> None:
        for number in self._numbers:
            length = self.steps // self.boxes + (number < self.steps % self.boxes)
            try:
                await self._episode(number, length)
            except Lost as lost:
                self.counts["lost boxes"] += 1
                self.wrong.append(f"box {number}: {lost}")
            except MusterError as error:
                self.wrong.append(f"box {number}: {error}")

    async def _episode(self, number: int, length: int) -> None:
        """One box from its acquisition to its release."""
        key = codec.key_to_pb(EpisodeKey(world.RUN, f"g{number}", 0, 0, 1))
        box = await self._acquired(key)
        forks = self.dice.randrange(1, length) if length > 1 else 0
        for turn in range(length):
            if turn == forks and self.dice.random() < _FORKED:
                await self._fork(number, key, box, turn)
            await self._step(key, box, turn)
            self.counts["steps"] += 1
        if self.dice.random() < _VERIFIED:
            asked = pb.VerifyRequest(episode=key, box=box, after_turn=length - 1)
            verdict = await self._call("Verify", asked)
            self.counts["verdicts"] += 1
            if verdict.reward != 1.0:
                self.wrong.append(f"box {number}: reward {verdict.reward} {verdict.detail}")
        await self._released(key, box)

    async def _acquired(self, key: common_pb2.EpisodeKey) -> str:
        got = await self._call("AcquireBox", pb.AcquireBoxRequest(episode=key, task=self._task))
        self.counts["boxes"] += 1
        self.counts[f"acquired {pb.BoxSource.Name(got.source).lower()}"] += 1
        return str(got.box)

    async def _step(self, key: common_pb2.EpisodeKey, box: str, turn: int) -> None:
        """One step, which has to be the first of its turn and the next of its box."""
        pause = self.dice.choice((0, 0, 0, 0.02, 0.1, 0.4))
        command = f"sleep {pause}; echo x >> n; echo {turn + 1} > want; wc -l < n"
        asked = pb.ExecRequest(
            episode=key, box=box, turn=turn, command=command, timeout_s=60, after_turn=turn - 1
        )
        found = await self._call("Exec", asked)
        self.counts["repeated answers"] += found.repeated
        said = (found.output_head + found.output_tail).decode("utf-8", "replace")
        if said != f"{turn + 1}\n" or found.exit_code:
            self.wrong.append(f"{box} turn {turn}: {found.exit_code} {said!r}")

    async def _fork(self, number: int, key: common_pb2.EpisodeKey, box: str, turn: int) -> None:
        """A fork goes on where its parent is, and changes nothing of it."""
        into = codec.key_to_pb(EpisodeKey(world.RUN, f"g{number}", 1, 0, 1))
        asked = pb.ForkBoxRequest(episode=key, box=box, after_turn=turn - 1, into=into)
        forked = str((await self._call("ForkBox", asked)).box)
        self.counts["forks"] += 1
        for later in range(turn, turn + _FORK_STEPS):
            await self._step(into, forked, later)
        await self._released(into, forked)

    async def _released(self, key: common_pb2.EpisodeKey, box: str) -> None:
        await self._call("ReleaseBox", pb.ReleaseBoxRequest(episode=key, box=box))

    async def _kill(self) -> None:
        """Kill when so many steps are done, and a moment later."""
        at = sorted(self.dice.sample(range(self.steps), self.kills))
        for done in at:
            while self.counts["steps"] < done and not self._idle():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(self.dice.uniform(0, 0.3))
            await self.host.kill()
            self.counts["kills"] += 1
            await self.host.start()
            if self.dice.random() < _AGAIN:
                await asyncio.sleep(self.dice.uniform(0, 2.0))
                await self.host.kill()
                self.counts["kills while starting"] += 1
                await self.host.start()
            self.restarts_s.append(await self.host.reach())

    def _idle(self) -> bool:
        """Boxes were lost or refused, so that the steps will never be reached."""
        return self.counts["boxes"] >= self.boxes and len(self.wrong) > 0

    async def _watch(self) -> None:
        while True:
            service, keeper = await asyncio.to_thread(self.host.rss_kib)
            if service and keeper:
                self.read.append((self.counts["steps"], service, keeper))
            there = await asyncio.to_thread(self.host.traces)
            for kind, found in there.items():
                self.most[kind] = max(self.most[kind], len(found))
            await asyncio.sleep(_POLL_S)

    async def _look_back(self) -> None:
        """What is left, and what has grown."""
        for kind, left in (await asyncio.to_thread(self.host.traces)).items():
            self.counts[f"left {kind}"] = len(left)
            if left:
                self.wrong.append(f"{len(left)} {kind} left: {left[:3]}")
            if not self.most[kind]:
                self.wrong.append(f"no {kind} were ever seen: nothing is shown by none left")
        memory = self.memory()
        if not memory:
            self.wrong.append("memory was not read in the second half: nothing is shown by it")
        for name, (usual, growth) in memory.items():
            if self.steps >= _JUDGED_STEPS and growth > usual * GROWTH_MAX:
                self.wrong.append(f"{name}: {growth:.0f} KiB more on {usual:.0f} in half the steps")

    def memory(self) -> dict[str, tuple[float, float]]:
        """KiB of service and keeper in the second half of the steps: the median, and by how much
        they grow in it, as the slope has it. Empty when they were hardly read."""
        within = [read for read in self.read if read[0] >= self.steps / 2]
        done = [float(read[0]) for read in within]
        if len(set(done)) < _READ_MIN:
            return {}
        found = {}
        for at, name in enumerate(("service", "keeper"), start=1):
            kib = [float(read[at]) for read in within]
            slope = statistics.linear_regression(done, kib).slope
            found[name] = (statistics.median(kib), slope * self.steps / 2)
        return found


def _result(soak: Soak, settings: dict[str, Any], seconds: float) -> dict[str, Any]:
    memory = soak.memory()
    figures: dict[str, float] = {name: float(n) for name, n in sorted(soak.counts.items())}
    figures |= {f"{kind} at most": float(n) for kind, n in soak.most.items()}
    figures["starts of the service"] = float(soak.host.starts)
    figures["violations"] = float(len(soak.wrong))
    figures["seconds"] = seconds
    if soak.restarts_s:
        figures["restart to answer p50 s"] = _results.quantile(soak.restarts_s, 0.5)
        figures["restart to answer max s"] = max(soak.restarts_s)
    for name, (usual, growth) in memory.items():
        figures[f"{name} rss KiB, second half"] = usual
        figures[f"{name} rss KiB, growth in the second half"] = growth
    ratios = {f"{name} rss, growth in the second half": b / a for name, (a, b) in memory.items()}
    return {
        "name": "box_soak",
        "machine": _results.machine(),
        "settings": settings,
        "figures": figures,
        "ratios": ratios,
    }


async def _soak(folder: Path, args: argparse.Namespace) -> tuple[Soak, float]:
    began = monotonic()
    async with host(folder, args.at_once * 2 + 4) as found:
        soak = Soak(found, args.boxes, args.steps, args.kills, random.Random(args.seed))
        await soak.run(args.at_once)
    return soak, monotonic() - began


def main() -> int:
    """0 when nothing was wrong."""
    parser = argparse.ArgumentParser(description="Does a killed sandbox service lose anything?")
    parser.add_argument("--boxes", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=10000, help="of all boxes together")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=12, help="boxes at a time, forks apart")
    parser.add_argument("--json", metavar="PATH", help="write the result there; - for stdout")
    args = parser.parse_args()
    if args.steps < max(args.boxes, args.kills):
        parser.error("--steps: at least as many as boxes, and as kills")
    with tempfile.TemporaryDirectory(prefix="box-soak-") as name:
        soak, seconds = asyncio.run(_soak(Path(name), args))
    settings = {k: v for k, v in vars(args).items() if k != "json"}
    _results.publish(_result(soak, settings, seconds), args.json)
    shown = sys.stderr if args.json == "-" else sys.stdout
    for line in soak.wrong:
        print(f"VIOLATION {line}", file=shown)
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
