"""The kill matrix: real processes, a real server, a fault at every failpoint, audits.

    python -m tests.faults.kill_matrix [--only TEXT] [--runs N] [--engine] [--keep] [--json FILE]

Each run starts everything with `muster up`, submits a job, lets its faults happen (a service kills
itself, or calls a done effect failed, or is held while the server of the streams is killed), waits
for the job's end, stops, and audits what the streams say. A run whose job did not finish, that
collected fewer than 30 episodes, or whose audit finds anything, fails; a fault that never happened
is told. Without --engine the engine, the boxes and the policy are the fakes that ship beside the
real ones; with it, all are real.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muster.client import JobState, MusterClient
from muster.clock import monotonic
from muster.errors import MusterError, Unavailable
from muster.model import ensure_model
from muster.supervise import state
from muster.types import JobPolicy
from tests.faults.plan import Fault, engine_faults, faults, runs

ROOT = Path(__file__).parents[2]
MUSTER = Path(sys.executable).with_name("muster")
EPISODES_MIN = 30
_GROUPS, _SIBLINGS = 8, 4
# Kills the sandbox in the middle of steps: without it no box is lost, and none restored.
_BOXES_LOST = Fault("sandbox.exec.after", "kill")
_RUN_S = {False: 240.0, True: 900.0}
_FAKES = """
[inference]
engine = "fake"
[sandbox]
backend = "fake"
"""
_FAKE_POLICY = 'policy = "fake"\ntransport = "gloo"\n'
# Above it the fake policy finds a trajectory or other of a few groups (adapters/fake.py).
_RETURN_KL = 0.009
_RETURNS = ("trainer.return", "readybank.return", "readybank.top_up")
_CONFIG = """
groups_per_batch = 2
repairs_max = 4
[model]
path = "{model}"
[router]
listen = "127.0.0.1:{port}"
lag_max = 1
[trainer]
{policy}checkpoints_kept = 1
checkpoint_every = {every}
retry_s = 60
[readybank]
listen = "127.0.0.1:0"
{fakes}
"""


@dataclass
class Result:
    """What came of one run."""

    faults: list[Fault]
    happened: list[Fault] = field(default_factory=list)
    episodes: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


class Run:
    """One `muster up` with its faults."""

    def __init__(self, folder: Path, wanted: list[Fault], model: Path, *, engine: bool):
        self.folder, self.wanted, self.engine = folder, wanted, engine
        self.state, self.marks = folder / "state", folder / "failpoints"
        self.marks.mkdir()
        self.config = folder / "muster.toml"
        self.port = _free_port()
        text = _CONFIG.format(
            model=model,
            port=self.port,
            every=1 + any(fault.name.startswith("trainer.record_trained") for fault in wanted),
            policy="" if engine else _FAKE_POLICY + self._returns(),
            fakes="" if engine else _FAKES,
        )
        self.config.write_text(text, "utf-8")

    def _returns(self) -> str:
        """Groups are given back where a fault waits for that."""
        wanted = any(fault.name.startswith(_RETURNS) for fault in self.wanted)
        return f"return_kl = {_RETURN_KL}\n" if wanted else ""

    def _plans(self) -> list[Fault]:
        restores = any(fault.name.startswith("router.restore_box") for fault in self.wanted)
        helped = any(fault.name == _BOXES_LOST.name for fault in self.wanted)
        return [*self.wanted, _BOXES_LOST] if restores and not helped else self.wanted

    async def __call__(self) -> Result:
        result, begin = Result(self.wanted), monotonic()
        try:
            async with asyncio.timeout(_RUN_S[self.engine]), self._up():
                await self._collect(result)
        except TimeoutError:
            result.problems.append("the job did not end in time")
        except (MusterError, RuntimeError) as error:
            result.problems.append(str(error))
        except BaseExceptionGroup as group:
            result.problems.append("; ".join(map(str, group.exceptions)))
        result.seconds = monotonic() - begin
        done = {path.name.removesuffix(".done") for path in self.marks.glob("*.done")}
        result.happened = [fault for fault in self.wanted if fault.name in done]
        self._audit(result)
        return result

    @asynccontextmanager
    async def _up(self) -> AsyncIterator[None]:
        """Everything started; afterwards everything stopped."""
        environment = dict(
            os.environ,
            MUSTER_STATE_DIR=str(self.state),
            MUSTER_TEST_FAILPOINTS=",".join(fault.plan for fault in self._plans()),
            MUSTER_TEST_FAILPOINT_DIR=str(self.marks),
        )
        command = [str(MUSTER), "up", "--json", "--config", str(self.config)]
        with (self.folder / "up.jsonl").open("wb") as lines:
            process = subprocess.Popen(
                command, stdout=lines, stderr=subprocess.STDOUT, env=environment, cwd=ROOT
            )
        try:
            async with asyncio.TaskGroup() as tasks:
                outside = [
                    tasks.create_task(self._kill_held_servers(), name="kill-held-servers"),
                    tasks.create_task(self._still_runs(process), name="still-runs"),
                ]
                try:
                    yield
                finally:
                    for task in outside:
                        task.cancel()
        finally:
            process.send_signal(signal.SIGINT)
            try:
                await asyncio.to_thread(process.wait, 30)
            except subprocess.TimeoutExpired:
                process.kill()

    async def _still_runs(self, process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None:
            await asyncio.sleep(0.2)
        last = (self.folder / "up.jsonl").read_text("utf-8").splitlines()[-1:]
        raise RuntimeError(f"`muster up` ended with status {process.returncode}: {last}")

    async def _collect(self, result: Result) -> None:
        async with MusterClient(f"127.0.0.1:{self.port}", patience_s=90) as client:
            policy = JobPolicy(infra_ceiling=1.0)
            tasks = ROOT / "tasks"
            await client.submit(tasks, groups=1, group_size=2, job="cancelled", policy=policy)
            await self._patiently(lambda: _opened(client, "cancelled"))  # else nothing is filtered
            await self._patiently(lambda: client.cancel("cancelled"))
            await client.submit(
                tasks, groups=_GROUPS, group_size=_SIBLINGS, job="kept", policy=policy
            )
            async for progress in client.watch("kept"):
                result.episodes = progress.episodes_finished
                if progress.ended and progress.state is not JobState.DONE:
                    raise RuntimeError(f"the job ended {progress.state}")
            await self._retired()

    async def _patiently(self, call: Callable[[], Any]) -> None:
        until = monotonic() + 60
        while True:
            try:
                await call()
                return
            except MusterError as error:
                if monotonic() > until:
                    raise RuntimeError(str(error)) from error
                await asyncio.sleep(0.2)

    async def _retired(self) -> None:
        """Wait a bounded time for what follows the last step, where a fault waits for that."""
        late = ("readybank.retire", "readybank.archive", "readybank.trim", "trainer.", "inference.")
        names = [f.name for f in self.wanted if f.name.startswith(late)]
        for _ in range(100):
            if all((self.marks / f"{name}.done").exists() for name in names):
                break
            await asyncio.sleep(0.1)

    async def _kill_held_servers(self) -> None:
        """Whoever is held waits until the server of the streams was killed and is back."""
        while True:
            for held in self.marks.glob("*.held"):
                before = self._kill("redis")
                while self._pid("redis") in (before, 0):
                    await asyncio.sleep(0.05)
                held.unlink()
            await asyncio.sleep(0.05)

    def _pid(self, service: str) -> int:
        holding = state.read(self.state)
        child = holding.children.get(service) if holding else None
        return child.process.pid if child and child.process else 0

    def _kill(self, service: str) -> int:
        pid = self._pid(service)
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return pid

    def _audit(self, result: Result) -> None:
        command = [str(MUSTER), "audit", "--json", "--state-dir", str(self.state)]
        found = subprocess.run(command, capture_output=True, text=True)
        (self.folder / "audit.json").write_text(found.stdout, "utf-8")
        if found.returncode:
            result.problems.append(f"audit: {(found.stderr or found.stdout).strip()[:600]}")
        if result.episodes < EPISODES_MIN:
            result.problems.append(f"void: {result.episodes} episodes, {EPISODES_MIN} are needed")


async def _opened(client: MusterClient, job: str) -> None:
    """Raises Unavailable while no group of the job is open."""
    if not (await client.get(job)).groups_opened:
        raise Unavailable("no group is open yet")


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _tell(number: int, total: int, result: Result) -> None:
    verdict = "; ".join(result.problems) or "clean"
    print(
        f"run {number}/{total}: {len(result.happened)}/{len(result.faults)} faults, "
        f"{result.episodes} episodes, {result.seconds:.0f} s: {verdict}",
        flush=True,
    )
    for fault in result.faults:
        if fault not in result.happened:
            print(f"  did not happen: {fault.plan}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="faults whose NAME=ACTION contains this")
    parser.add_argument("--runs", type=int, default=0, help="at most so many runs")
    parser.add_argument("--engine", action="store_true", help="ten faults, all parts real")
    parser.add_argument("--keep", type=Path, help="keep the folders of failed runs here")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    every = engine_faults() if args.engine and not args.only else faults()
    wanted = [f for f in every if args.only in f.plan]
    packed = runs(wanted)[: args.runs or None]
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="muster-faults-") as name:
        model = ensure_model("smollm2-135m-instruct", Path(name) / "cache")
        for number, run in enumerate(packed, start=1):
            folder = Path(name) / f"run-{number:03d}"
            folder.mkdir()
            result = asyncio.run(Run(folder, run, model, engine=args.engine)())
            _tell(number, len(packed), result)
            results.append(result)
            if result.problems and args.keep:
                shutil.copytree(folder, args.keep / folder.name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
    return _judge(results, args.json)


def _judge(results: list[Result], path: Path | None) -> int:
    happened = sum(len(r.happened) for r in results)
    failed = [r for r in results if r.problems]
    missed = [f.plan for r in results for f in r.faults if f not in r.happened]
    figures = {
        "runs": len(results),
        "faults_wanted": sum(len(r.faults) for r in results),
        "faults_happened": happened,
        "episodes": sum(r.episodes for r in results),
        "runs_failed": len(failed),
        "missed": missed,
    }
    print(json.dumps(figures))
    if path:
        path.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")
    return 1 if failed or missed else 0


if __name__ == "__main__":
    sys.exit(main())
