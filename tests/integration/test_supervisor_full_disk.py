"""A full disk under the state folder: nothing is started, nothing dies, all goes on with room."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.supervise import procfs, state
from tests.integration.test_supervisor import Supervised

pytestmark = pytest.mark.root


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of a few megabytes."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(path: Path) -> None:
    """Until not a byte is left."""
    filling = subprocess.run(
        ["dd", "if=/dev/zero", f"of={path}", "bs=4096"], capture_output=True, text=True
    )
    assert "No space left" in filling.stderr


def test_a_service_that_dies_on_a_full_disk_is_started_when_there_is_room(small: Path) -> None:
    run = Supervised(small / "state", "serve", "serve")
    try:
        run.until_ready("redis", "s0", "s1")
        others = run.pid("s1")
        fill(small / "filled")
        os.kill(run.pid("s0"), signal.SIGKILL)
        run.until(service="s0", phase="restarting")
        again = run.until(service="s0", phase="restarting")  # told once, tried on and on
        assert "could not be started" in again["detail"]
        assert "No space left" in again["detail"]
        (small / "filled").unlink()
        run.until_ready("s0")
        assert run.pid("s1") == others
        processes = run.processes()
        assert run.interrupt()["status"] == 0
        assert [who for who in processes if procfs.alive(who)] == []
    finally:
        run.process.kill()
        run.process.wait()
        assert run.process.stdout is not None
        run.process.stdout.close()
        state.sweep(small / "state")
