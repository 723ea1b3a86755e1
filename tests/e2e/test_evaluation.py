"""`muster eval --model` on real parts: the checkpoint of a demo, on the held-out tasks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from muster.tracking_files import BOARDS, STEPS, read_rows, read_served
from tests.unit.evaluation.event_files import scalars

pytestmark = [pytest.mark.engine, pytest.mark.root, pytest.mark.timeout(1800)]

MUSTER = str(Path(sys.executable).with_name("muster"))


def test_a_demos_checkpoint_is_evaluated_as_it_was_served_in_training(tmp_path: Path) -> None:
    environment = dict(os.environ, MUSTER_STATE_DIR=str(tmp_path))
    demo = [MUSTER, "demo", "--batches", "1", "--temperature", "0.7", "--json"]
    assert subprocess.run(demo, env=environment, stdout=subprocess.DEVNULL).returncode == 0
    state = tmp_path / "demo"
    rows = read_rows(state / "tracking" / "main" / STEPS)
    assert {("step", 1), ("publication", 1)} <= {(row.kind, row.step) for row in rows}
    figures = next(row.figures for row in rows if row.kind == "step")
    assert figures["batch/time_to_trainable_batch_s"] > 0
    shown = scalars(state / "tracking" / "main" / BOARDS / "line-1")
    assert [step for step, _ in shown["train/loss"]] == [1]
    assert read_served(state, "main") is not None
    out = tmp_path / "result.json"
    model = str(state / "checkpoints" / "main" / "step-000001")
    command = [MUSTER, "eval", "--model", model, "--samples", "2", "--temperature", "0.7"]
    done = subprocess.run([*command, "--out", str(out)], env=environment, stdout=subprocess.PIPE)
    assert done.returncode == 0
    found = json.loads(out.read_text())
    assert found["complete"]
    assert found["overall"]["samples"] == 2 * found["overall"]["tasks"]
    assert [version["versions"] for version in found["versions"]] == [[0]]
    assert not [w for w in found["warnings"] if "differs" in w or "otherwise" in w]
