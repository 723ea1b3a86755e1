"""Runs of the routing benchmark in several processes, each kept once it is done.

Owns: the processes, the folder of finished runs. Promise: a kept run is used only while the code of
the simulation and of the machines in it is the same, byte by byte; results come in the order of
the tasks, whatever ends first.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import msgspec

from muster.types import Value
from sim.rollout.routing import Case, Figures, Race

_ROOT = Path(__file__).parent.parent
_CODE = ("sim/rollout", "services/router", "services/readybank", "services/sandbox/pool.py")


class Task(Value, frozen=True):
    """One run."""

    name: str
    case: Case
    seed: int
    groups: int


def code_digest() -> str:
    """Of all that a run executes."""
    found = hashlib.sha256()
    for name in _CODE:
        path = _ROOT / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            found.update(str(file.relative_to(_ROOT)).encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:16]


def run(task: Task) -> Figures:
    return Race(task.name, task.case, task.seed, task.groups).run()


def results(tasks: Sequence[Task], jobs: int, tell: Callable[[str], None]) -> list[Figures]:
    """Of all tasks, in their order."""
    folder = Path(os.environ.get("MUSTER_CACHE", ".muster")) / "bench-routing" / code_digest()
    folder.mkdir(parents=True, exist_ok=True)
    kept = {task: _kept(folder, task) for task in tasks}
    open_ = [task for task in tasks if kept[task] is None]
    if len(open_) < len(tasks):
        tell(f"{len(tasks) - len(open_)} of {len(tasks)} runs were kept from before")
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, jobs), mp_context=spawn) as pool:
        asked = {pool.submit(run, task): task for task in open_}
        try:
            for number, future in enumerate(as_completed(asked), 1):
                task, figures = asked[future], future.result()
                kept[task] = figures
                _file(folder, task).write_bytes(msgspec.json.encode(figures))
                if number % 20 == 0 or number == len(open_):
                    tell(f"{number} of {len(open_)} runs")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # or it runs all the rest for nobody
            raise
    return [found for task in tasks if (found := kept[task]) is not None]


def _file(folder: Path, task: Task) -> Path:
    name = f"{task.name}-{task.case.name}-{task.seed}-{task.groups}"
    return folder / f"{name}-{hashlib.sha256(msgspec.json.encode(task)).hexdigest()[:8]}.json"


def _kept(folder: Path, task: Task) -> Figures | None:
    path = _file(folder, task)
    return msgspec.json.decode(path.read_bytes(), type=Figures) if path.exists() else None
