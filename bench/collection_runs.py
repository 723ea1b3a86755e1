"""Making the runs of bench.collection, each once: results lie in a folder until code changes.

Owns: the cache and the processes. Promise: a result is used again only for equal settings and equal
code of everything that it depends on; an interrupted benchmark goes on where it was. Does not
cover: what is run (collection_plan.py).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.collection_plan import MAIN, Job
from sim.rollout.run import Result, run

ROOT = Path(__file__).resolve().parent.parent
_WORLD = ("sim/rollout",)
_MACHINES = ("services/router", "services/readybank", "services/sandbox", "muster")
_NO_MACHINE = frozenset(MAIN) - {"muster"}
_NOT_DECIDING = frozenset({"driver.py", "server.py", "__main__.py"})

Results = dict[Job, Result]


def fingerprint(folders: Iterable[str]) -> str:
    """Of the code that a result depends on: pure modules only, shells decide nothing."""
    found = hashlib.sha256()
    for folder in folders:
        deep = folder.startswith("sim")
        files = (ROOT / folder).rglob("*.py") if deep else (ROOT / folder).glob("*.py")
        for path in sorted(files):
            if path.name not in _NOT_DECIDING:
                found.update(f"{path.relative_to(ROOT)}\n".encode())
                found.update(path.read_bytes())
    return found.hexdigest()[:12]


class Cache:
    """A folder of results."""

    def __init__(self, folder: Path):
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._prints = {False: fingerprint(_WORLD), True: fingerprint((*_WORLD, *_MACHINES))}

    def path(self, job: Job) -> Path:
        """Where its result lies, or will."""
        code = self._prints[job.arm not in _NO_MACHINE]
        told = f"{job.arm} {job.regime} {job.seed} {job.batches} {int(job.follow)} {code}"
        name = "".join(c if c.isalnum() else "-" for c in told)
        return self._folder / f"{name}.json"

    def get(self, job: Job) -> Result | None:
        path = self.path(job)
        return msgspec.json.decode(path.read_bytes(), type=Result) if path.exists() else None

    def put(self, job: Job, result: Result) -> None:
        path = self.path(job)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(msgspec.json.encode(result))
        fresh.replace(path)


def results(jobs: tuple[Job, ...], cache: Cache, processes: int) -> Results:
    """All of them; those that are not in the cache are run now, `processes` at a time."""
    found: Results = {}
    for job in jobs:
        known = cache.get(job)
        if known is not None:
            found[job] = known
    missing = [job for job in jobs if job not in found]
    for job, result in _ran(missing, processes):
        cache.put(job, result)
        found[job] = result
    return found


def _ran(jobs: list[Job], processes: int) -> Iterator[tuple[Job, Result]]:
    if not jobs:
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with (
        Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as shown,
        ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool,
    ):
        bar = shown.add_task("runs", total=len(jobs))
        asked = {pool.submit(_run, job): job for job in jobs}
        try:
            for future in as_completed(asked):
                job = asked[future]
                shown.update(bar, advance=1, description=f"{job.arm}, {job.regime}, {job.seed}")
                yield job, future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # or it runs all the rest for nobody
            raise


def _run(job: Job) -> Result:
    return run(job.arm, job.regime, job.seed, job.batches, follow=job.follow)
