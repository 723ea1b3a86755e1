"""Faults of publications on real processes, with a canary on every replica all along.

    python -m tests.faults.publication [--engine vllm|fake] [--only TEXT] [--json FILE] [--keep]

An engine is killed before, in and after staging and commit; a trainer in each of its phases;
versions are sent with a tensor left out, reshaped, corrupted or kept old; a replica joins while a
step is trained; two versions are made while one is sent. After each fault every replica must serve
the newest version. What the canary heard is held against fresh engines, bit for bit: every answer
must be that of exactly the version that it names. With `--engine fake` the engines are scripted
(they receive and verify all bytes, and answer by version), which takes a minute and no memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from muster.clock import monotonic
from muster.model import ensure_model
from tests.faults.cycling_trainer import RING
from tests.faults.publication_doctored import DOCTORED, publish_doctored
from tests.faults.publication_world import (
    DEADLINE_S,
    LONG_S,
    STEP_S,
    Answer,
    World,
    world,
)

GRACE_S = 10.0  # a look at the replicas, a record, a slow machine
START_S = {"vllm": 600.0, "fake": 300.0}
DIES_S = 600.0
ENGINE_KILLS = (
    ("before staging", "inference.prepare.before=kill@2"),
    ("while staging", "inference.stage.before=kill@2"),
    ("after staging", "inference.stage.after=kill@2"),
    ("before commit", "inference.commit.before=kill@2"),
    ("in the commit", "inference.commit.before=hold@2"),
    ("after commit", "inference.commit.after=kill@2"),
)
TRAINER_KILLS = tuple(
    f"trainer.{effect}.{when}"
    for effect in ("lease", "save", "record_trained", "record_durable", "acknowledge")
    for when in ("before", "after")
) + tuple(
    f"trainer.{effect}.{when}"
    for effect in ("prepare", "commit", "record_published")
    for when in ("before", "after")
)


@dataclass
class Result:
    """One fault and what came of it."""

    fault: str
    where: str
    seconds: float = 0.0  # from the fault until every replica served the newest version
    problems: list[str] = field(default_factory=list)


class Cases:
    """All faults over one world, in turn."""

    def __init__(self, world: World, only: str):
        self.world, self.only = world, only
        self.results: list[Result] = []
        self.fed = 0

    async def feed(self, batches: int) -> None:
        self.fed += batches
        await self.world.batches(batches)

    async def healthy(self) -> None:
        """All that was fed is trained, and every replica serves the newest version."""
        version = await self.world.trained(self.fed)
        await self.world.all_serve(version, START_S[self.world.engine])

    async def case(self, fault: str, where: str, run: Callable[[], Awaitable[None]]) -> None:
        """`run` brings the fault about; what must follow is the same for all."""
        if self.only not in f"{fault} {where}":
            return
        result = Result(fault, where)
        self.results.append(result)
        try:
            await run()
            began = monotonic()
            await self.healthy()
            result.seconds = monotonic() - began
        except (TimeoutError, AssertionError) as error:
            result.problems.append(str(error) or type(error).__name__)
        _tell(result)

    async def all(self) -> None:
        self.world.start_replica("a")
        self.world.start_trainer()
        await self.healthy()  # whichever cases are wanted
        await self.case("none", "start", self._nothing)
        for fault in DOCTORED:
            await self.case("sent", fault, lambda f=fault: self._doctored(f))  # type: ignore[misc]
        for where, point in ENGINE_KILLS:
            await self.case(
                "engine killed",
                where,
                lambda p=point: self._engine(p),  # type: ignore[misc]
            )
        await self.case("joins", "while a step is trained", self._joins)
        await self.case("made", "while one is sent", self._back_to_back)
        for point in TRAINER_KILLS:
            await self.case(
                "trainer killed",
                point.removeprefix("trainer."),
                lambda p=point: self._trainer(p),  # type: ignore[misc]
            )
        await self.case("trainer killed", "in a step", self._trainer_in_a_step)
        await self.case("trainer killed", "while staging", self._trainer_while_staging)
        await self.feed(1)
        await self.case("none", "end", self._nothing)

    async def _nothing(self) -> None:
        return

    async def _doctored(self, fault: str) -> None:
        before = await self.world.scores("a")
        error = await publish_doctored(self.world, "a", fault)
        assert error, "it was taken"
        assert await self.world.scores("a") == before, "it left a trace"
        await self.feed(1)

    async def _engine(self, point: str) -> None:
        """Its life with the failpoint begins now; it dies in a publication of that life."""
        world = self.world
        world.kill(world.replicas["a"])
        world.start_replica("a", point)
        held = world.marks / f"{point.partition('=')[0]}.held"
        process = world.replicas["a"]
        for _ in range(4):  # the second publication of its life meets it, be it a resend or new
            await self._dies(process, held)
            if process.poll() is None and not held.exists():
                await self.feed(1)
                await world.trained(self.fed)
        if held.exists():
            held.unlink()  # it goes on, and is killed while it does
            await asyncio.sleep(0.06)
            world.kill(process)
        assert process.poll() is not None, "the fault never happened"
        world.start_replica("a")

    async def _dies(self, process: subprocess.Popen[bytes], held: Path) -> None:
        """It is killed, or held, or serves what was fed."""
        world = self.world

        async def over() -> bool:
            if process.poll() is not None or _there(held):
                return True
            newest = await world.trained(self.fed)
            at = await world.status("a")
            return at is not None and at.version == newest

        await world.until(over, "the publication meets the fault or ends", DIES_S)

    async def _joins(self) -> None:
        """It comes while a step is trained, with the weights of the newest checkpoint only."""
        world = self.world
        await self.feed(1)  # sealed, perhaps in no checkpoint
        await self.healthy()
        newest = await world.trained(self.fed)
        world.steps_take(LONG_S)
        await self.feed(1)
        world.start_replica("b")
        await world.all_serve(newest, START_S[world.engine] + LONG_S)
        assert await world.trained(0) == newest, "the step ended before it served"
        world.steps_take(STEP_S)
        await self._restart()  # the long step is trained again, and is short

    async def _back_to_back(self) -> None:
        await self.feed(4)

    async def _restart(self, fail: str = "") -> None:
        world = self.world
        world.kill(world.trainer)
        world.start_trainer(fail)

    async def _trainer(self, point: str) -> None:
        world = self.world
        await self._restart(f"{point}=kill")
        await self.feed(2)  # one of them is sealed, one is saved
        await self._ends()
        world.start_trainer()

    async def _ends(self) -> None:
        async def ended() -> bool:
            assert self.world.trainer is not None
            return self.world.trainer.poll() is not None

        await self.world.until(ended, "the fault happens", DIES_S)

    async def _trainer_in_a_step(self) -> None:
        world = self.world
        world.steps_take(LONG_S)
        await self.feed(1)

        async def leased() -> bool:
            return self.fed in await world.frozen()

        await world.until(leased, "the batch of the step is sent", DIES_S)
        await world.until(world.training, "the step is trained", DIES_S)
        world.steps_take(STEP_S)
        await self._restart()

    async def _trainer_while_staging(self) -> None:
        """A replica that holds in its second staging keeps the sender there, too."""
        world, point = self.world, "inference.stage.before"
        held = world.marks / f"{point}.held"
        world.kill(world.replicas["a"])
        world.start_replica("a", f"{point}=hold@2")
        for _ in range(4):
            await self._dies(world.replicas["a"], held)
            if held.exists():
                break
            await self.feed(1)
            await world.trained(self.fed)
        assert held.exists(), "no version was held on its way"
        await self._restart()  # which lets go of what is held


async def judged(made: World, expected: dict[int, Answer]) -> Result:
    """What the canary heard, and how long publications took. `expected`: by place of the ring;
    empty: no fresh engine was asked, and all answers of one version must be the same."""
    verdict = Result("canary", f"{made.seen.asked} rounds, {made.seen.refused} without an answer")
    places = await made.place_of()
    for (replica, version), answers in sorted(made.seen.answers.items()):
        others = {a for (_, v), found in made.seen.answers.items() if v == version for a in found}
        right = {expected[places[version]]} if expected else set(list(others)[:1])
        if answers != right:
            verdict.problems.append(
                f"{replica} answered {len(answers)} ways under version {version}, or wrongly"
            )
    for record in await made.records():
        if record.times.took_s > DEADLINE_S + GRACE_S:
            verdict.problems.append(f"version {record.version} took {record.times.took_s:.0f} s")
    _tell(verdict)
    return verdict


async def fresh_answers(folder: Path, model: Path, places: set[int]) -> dict[int, Answer]:
    """What engines say that were started with the weights themselves."""
    from safetensors.torch import load_file, save_file

    from tests.faults.cycling_trainer import weights_at

    found: dict[int, Answer] = {}
    base = load_file(model / "model.safetensors")
    for place in sorted(places):
        here = folder / f"fresh-{place}"
        here.mkdir()
        copy = here / "model"
        shutil.copytree(model, copy)
        state = {name: t.contiguous() for name, t in weights_at(base, place).items()}
        save_file(state, str(copy / "model.safetensors"), metadata={"format": "pt"})
        async with world(here, copy, "vllm") as alone:
            alone.start_replica("fresh")

            async def answers(of: World = alone) -> Answer | None:
                got = await of.scores("fresh")
                return got[1] if got else None

            found[place] = await alone.until(answers, "a fresh engine answers", START_S["vllm"])
        shutil.rmtree(copy)
    return found


async def run(folder: Path, engine: str, model: Path, only: str = "") -> list[Result]:
    """All cases; the last result is the canary's."""
    async with world(folder, model, engine) as made:
        cases = Cases(made, only)
        await cases.all()
        places = set((await made.place_of()).values())
        if engine == "fake":
            return [*cases.results, await judged(made, {})]
        made.end()  # their memory is needed
        expected = await fresh_answers(folder, model, places & set(range(RING)))
        return [*cases.results, await judged(made, expected)]


def _there(path: Path) -> bool:
    return path.exists()


def _tell(result: Result) -> None:
    verdict = "; ".join(result.problems) or "held"
    sys.stdout.write(f"{result.fault:<15} {result.where:<28} {result.seconds:6.1f} s  {verdict}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.faults.publication", description=__doc__)
    parser.add_argument("--engine", choices=("vllm", "fake"), default="vllm")
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--json", default="", help="write the results to this file")
    parser.add_argument("--keep", action="store_true", help="leave the folder with all logs")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="muster-publication-"))
    cache = Path(os.environ.get("MUSTER_CACHE", ".muster/cache"))
    if arguments.engine == "vllm":
        model = ensure_model(os.environ.get("MUSTER_TEST_MODEL", "smollm2-135m-instruct"), cache)
    else:
        from tests.faults.publication_doctored import tiny_model

        model = tiny_model(folder / "tiny")
    try:
        results = asyncio.run(run(folder, arguments.engine, model, arguments.only))
    finally:
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)
    if arguments.json:
        rows = [vars(result) for result in results]
        Path(arguments.json).write_text(json.dumps(rows, indent=2) + "\n", "utf-8")
    return 1 if any(result.problems for result in results) else 0


if __name__ == "__main__":
    raise SystemExit(main())
