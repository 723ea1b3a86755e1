"""What a claim makes, and what is left of one that came to nothing."""

from __future__ import annotations

import fcntl
import subprocess
from pathlib import Path

import msgspec
import pytest

from muster.errors import Refused
from muster.supervise import procfs
from muster.supervise.state import (
    Child,
    Holding,
    claim,
    router_address,
    sweep,
    write_router_address,
)


def test_a_start_that_came_to_nothing_leaves_no_folder(tmp_path: Path) -> None:
    made, _ = claim(tmp_path / "a" / "b" / "state")
    (made.state_dir / "redis").mkdir()
    made.release()
    assert list(tmp_path.iterdir()) == []


def test_what_a_start_has_written_stays(tmp_path: Path) -> None:
    made, _ = claim(tmp_path / "state")
    (made.state_dir / "logs").mkdir()
    (made.state_dir / "logs" / "redis.log").write_text("why\n")
    made.release()
    assert (tmp_path / "state" / "logs" / "redis.log").read_text() == "why\n"


def test_a_folder_that_was_there_stays_though_it_is_empty(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    made, _ = claim(tmp_path / "state")
    made.release()
    assert (tmp_path / "state").is_dir()


def test_a_neighbour_in_a_new_folder_stays(tmp_path: Path) -> None:
    made, _ = claim(tmp_path / "new" / "state")
    (tmp_path / "new" / "other").mkdir()
    made.release()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["other"]


def test_a_lock_that_its_holder_removed_is_no_lock(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    state_dir.mkdir()
    removed = (state_dir / "supervisor.lock").open("a+")
    fcntl.flock(removed, fcntl.LOCK_EX)
    (state_dir / "supervisor.lock").unlink()
    first, _ = claim(state_dir)  # of the file that is there now
    with pytest.raises(Refused, match="another muster is running"):
        claim(state_dir)
    first.release()
    removed.close()


def test_the_routers_address_is_known_while_the_supervisor_runs(tmp_path: Path) -> None:
    made, _ = claim(tmp_path / "state")
    assert router_address(made.state_dir) == ""
    write_router_address(made.state_dir, "127.0.0.1:7400")
    write_router_address(made.state_dir, "127.0.0.1:7411")
    assert router_address(made.state_dir) == "127.0.0.1:7411"
    made.release()
    assert router_address(made.state_dir) == ""


def test_what_a_service_hid_from_its_group_and_environment_is_ended_with_it(
    tmp_path: Path,
) -> None:
    command = ["bash", "-c", "env -i setsid sleep 600 & echo $!; wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0) as service:
        assert service.stdout is not None
        hidden = procfs.identify(int(service.stdout.readline()))
        assert hidden is not None
        children = {"s0": Child(None, procfs.identify(service.pid))}
        record = Holding(procfs.Identity(service.pid, 0), "", children)
        (tmp_path / "supervisor.json").write_bytes(msgspec.json.encode(record))
        sweep(tmp_path)
        assert not procfs.alive(hidden)
