"""SIGKILL of a service in the middle of a demo on real parts: nothing is lost, nothing twice."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from muster.supervise import state
from tests.e2e.leftovers import Muster
from tests.e2e.test_demo import MUSTER

pytestmark = [pytest.mark.engine, pytest.mark.root, pytest.mark.timeout(1800)]


GROUPS = 2


def _due(line: dict[str, Any]) -> bool:
    """Turns are finished, work is left: how many of each at a poll depends on what is sampled.

    A group of one-command episodes can be complete before five turns are.
    """
    return line["event"] == "job" and line["turns"] >= 3 and line["groups_complete"] < GROUPS


@pytest.mark.parametrize("service", ["router", "readybank"])
def test_a_killed_service_loses_nothing(
    service: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    muster = Muster(
        tmp_path, "demo", "--batches", "1", "--groups-per-batch", str(GROUPS), config=None
    )
    muster.until(_due)
    holding = state.read(tmp_path / "demo")
    assert holding is not None
    killed = holding.children[service].process
    assert killed is not None
    os.kill(killed.pid, signal.SIGKILL)
    muster.until(lambda line: line.get("service") == service and line["phase"] == "ready")
    again = state.read(tmp_path / "demo")
    assert again is not None
    restarted = again.children[service]
    assert restarted.process is not None
    for name, value in (("killed_pid", killed.pid), ("new_pid", restarted.process.pid)):
        record_property(name, value)
    assert restarted.process.pid != killed.pid
    assert restarted.starts == 2
    lines = list(muster.lines())
    assert muster.ended() == 0
    [report] = [line for line in lines if line["event"] == "report"]
    assert report["totals"]["groups_trained"] == GROUPS
    command = [MUSTER, "audit", "--state-dir", str(tmp_path / "demo")]
    audit = subprocess.run(command, capture_output=True, text=True)
    assert audit.returncode == 0, audit.stdout
