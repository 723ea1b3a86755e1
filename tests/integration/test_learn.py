"""A learning run on real processes: killed in the middle it goes on, and trains on no lost attempt.

Engine, boxes and policy are the fakes that ship beside the real ones, so what it learns is nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench import _learn_plan as plan
from bench._learn_run import STATE
from muster.model import ensure_model
from muster.supervise.prepare import cache_dir

ROOT = Path(__file__).parents[2]
WAIT_S = 900.0  # for anything; on an idle machine all is over within a minute
STEPS, GROUPS, SIBLINGS = 6, 3, 4
pytestmark = pytest.mark.timeout(2000)
_CODE = """
import sys
from pathlib import Path
from bench import _learn_plan as plan
from bench._learn_run import Run
recipe = plan.Recipe(steps={steps}, groups={groups}, group_size={siblings}, checkpoint_every=2)
fakes = dict(
    MUSTER_INFERENCE__ENGINE="fake", MUSTER_SANDBOX__BACKEND="fake", MUSTER_TRAINER__POLICY="fake"
)
Run(plan.ARMS[sys.argv[1]], 1, recipe, Path(sys.argv[2]), sys.argv[3], fakes).go()
"""


@contextmanager
def started(arm: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Killed when the block is left before its end."""
    code = _CODE.format(steps=STEPS, groups=GROUPS, siblings=SIBLINGS)
    model = ensure_model("smollm2-135m-instruct", cache_dir())
    command = [sys.executable, "-c", code, arm, str(folder), str(model)]
    with (folder / "log").open("ab") as log:
        running = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, process_group=0)
    try:
        yield running
    finally:
        running.kill()  # its services end with it
        running.wait(WAIT_S)


def ended(arm: str, folder: Path) -> dict[str, Any]:
    """What the run found, started and waited for."""
    with started(arm, folder) as running:
        status = running.wait(WAIT_S)
    assert status == 0, (folder / "log").read_text("utf-8", "replace")[-3000:]
    found: dict[str, Any] = json.loads((folder / STATE).read_text("utf-8"))
    return found


def until(folder: Path, words: str) -> None:
    """Until the run has said that."""
    deadline = time.monotonic() + WAIT_S
    while words not in (folder / "log").read_text("utf-8", "replace"):
        assert time.monotonic() < deadline, (folder / "log").read_text("utf-8", "replace")[-3000:]
        time.sleep(0.05)


def test_a_run_that_is_killed_in_its_training_goes_on_there(tmp_path: Path) -> None:
    with started("main", tmp_path):
        until(tmp_path, f"{2 * GROUPS} of {STEPS * GROUPS} groups trained")
    before = json.loads((tmp_path / STATE).read_text("utf-8"))["before"]
    found = ended("main", tmp_path)
    assert (found["starts"], found["before"]) == (2, before)
    assert [step["step"] for step in found["training"]["steps"]] == list(range(1, STEPS + 1))
    assert found["training"]["siblings_trained"] == STEPS * GROUPS * SIBLINGS
    assert found["after"]["0.2"]["samples"] == len(plan.TIER) * plan.SAMPLES
    assert found["after"]["0.2"]["instances"] == before["0.2"]["instances"]


def test_attempts_lost_to_infrastructure_are_labelled_repaired_and_not_trained(
    tmp_path: Path,
) -> None:
    told = ended("infra20", tmp_path)["training"]
    lost = {name: n for name, n in told["attempts"].items() if name.startswith("infra_failure")}
    assert sorted(lost) == ["infra_failure: box_start", "infra_failure: host_lost"]
    assert 0 < sum(lost.values()) < sum(told["attempts"].values()) / 2
    assert told["repaired"] >= sum(lost.values()) - told["siblings_left_out"]
    assert told["siblings_trained"] + told["siblings_left_out"] == STEPS * GROUPS * SIBLINGS
    assert sum(step["samples"] for step in told["steps"]) == told["siblings_trained"]
