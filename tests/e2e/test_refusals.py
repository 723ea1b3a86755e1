"""What `muster up` says when a service cannot start."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from tests.e2e.test_demo import MUSTER

pytestmark = [pytest.mark.engine, pytest.mark.root]


def test_a_taken_port_is_named_and_everything_stops(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        config = tmp_path / "muster.toml"
        config.write_text(f"[router]\nlisten = '{address}'\n[inference]\nengine = 'fake'\n")
        environment = dict(os.environ, MUSTER_STATE_DIR=str(tmp_path / "state"))
        done = subprocess.run(
            [MUSTER, "up", "--config", str(config)],
            capture_output=True,
            text=True,
            env=environment,
        )
    assert done.returncode == 2
    [said] = done.stderr.splitlines()
    assert said.startswith(f"router: router.listen = '{address}': cannot listen there")
    assert "→ stop what uses that port, or choose another" in said
