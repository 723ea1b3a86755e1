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

pytestmark = [pytest.mark.engine, pytest.mark.root]


def _due(line: dict[str, Any]) -> bool:
    """Five turns are finished and no group is complete yet."""
    return line["event"] == "job" and line["turns"] >= 5 and line["groups_complete"] == 0


@pytest.mark.parametrize("service", ["router", "readybank"])
def test_a_killed_service_loses_nothing(
    service: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    muster = Muster(tmp_path, "demo", "--batches", "1", "--groups-per-batch", "2", config=None)
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
    assert report["totals"]["groups_trained"] == 2
    command = [MUSTER, "audit", "--state-dir", str(tmp_path / "demo")]
    audit = subprocess.run(command, capture_output=True, text=True)
    assert audit.returncode == 0, audit.stdout
