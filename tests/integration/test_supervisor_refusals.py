"""`muster up` beside a server that would lose what it is given."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.backoff import ConstantBackoff
from redis.exceptions import ConnectionError as NotThere
from redis.retry import Retry

from muster.supervise.plan import server_binary


@pytest.fixture
def volatile_server(tmp_path: Path) -> Iterator[str]:
    """A server without an append-only file; its URL."""
    path = tmp_path / "s"
    command = [server_binary(), "--port", "0", "--unixsocket", str(path), "--save", ""]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, process_group=0) as server:
        retry = Retry(ConstantBackoff(0.05), 400, (NotThere,))
        with Redis(unix_socket_path=str(path), retry=retry) as client:
            client.ping()
        yield f"unix://{path}"
        server.kill()


def test_a_server_without_an_append_only_file_is_refused(
    volatile_server: str, tmp_path: Path
) -> None:
    config = tmp_path / "muster.toml"
    config.write_text(f"state_dir = '{tmp_path}/state'\n[redis]\nurl = '{volatile_server}'\n")
    command = [sys.executable, "-m", "muster.cli.main", "up", "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    [said] = done.stderr.splitlines()
    assert said.startswith(f"redis.url = '{volatile_server}': this Redis keeps no append-only file")
    assert "→ set `appendonly yes` there, or accept it with redis.allow_volatile" in said
    assert not (tmp_path / "state").exists()  # nothing came into it
