"""What a box must not leave with its host: a full stage, a shared mount, dead processes."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from muster.types import Limits
from services.sandbox.adapters.native.backend import open_native
from tests.integration.native_world import ENV, children, fresh, told
from tests.integration.sandbox_owner import owner

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="native boxes need root"),
]
# Bytes, then empty files, on every mount that the box sees, until nothing more is taken.
FILL = """python3 - <<'END'
import os
full = 0
for line in open("/proc/self/mounts"):
    at = line.split()[1]
    if not os.path.isdir(at) or not os.access(at, os.W_OK):
        continue
    try:
        with open(f"{at}/fill", "wb") as file:
            while True:
                file.write(bytes(1 << 20))
                file.flush()
    except OSError:
        full += 1
    try:
        for number in range(100000):
            open(f"{at}/fill{number}", "w").close()
    except OSError:
        pass
print(full)
END
"""


async def test_a_box_that_fills_all_that_it_can_write_leaves_room_for_others(
    tmp_path: Path,
) -> None:
    async with open_native(tmp_path / "run") as backend:
        await fresh(backend, "neighbour")
        await fresh(backend, "a", limits=Limits(disk_bytes=8 << 20, disk_inodes=2000))
        stage = f"/proc/{backend.keeper_pid}/root{tmp_path}/run/stage"
        before = os.statvfs(stage)
        found = await backend.run("a", FILL, 60)
        assert int(found.head) >= 3  # its own layer, /dev/shm, the state of its shell
        assert found.disk_full
        after = os.statvfs(stage)
        assert (after.f_bfree, after.f_ffree) == (before.f_bfree, before.f_ffree)
        await fresh(backend, "next")
        for name in ("next", "neighbour"):
            assert await told(backend, name, "echo x > f; cat f") == "x\n"
        # It hurts itself alone: a step of it still begins, and says why it cannot write.
        assert "No space left" in await told(backend, "a", "echo more > /app/more")


async def test_no_mount_of_a_box_or_of_the_keeper_is_shared_with_the_host(tmp_path: Path) -> None:
    # Where every mount of the host is shared, as systemd has it.
    shared = ("unshare", "--mount", "--propagation", "shared")
    async with owner(tmp_path / "run", before=shared) as service:
        await service.box("a")
        (first,) = children(service.keeper)
        assert _shared(service.process.pid), "nothing was shared here: proves nothing"
        assert _shared(service.keeper) == _shared(first) == []
        assert await service.stop() == 0


async def test_processes_that_a_step_leaves_dead_are_cleared_away(tmp_path: Path) -> None:
    async with open_native(tmp_path / "run") as backend:
        await backend.start("a", Limits(pids=64))
        await backend.set_session("a", "/app", dict(ENV))
        # 600 whose parent is gone, of 64 that there may be at a time; a dead one counts too.
        for _ in range(20):
            found = await backend.run("a", "for i in $(seq 30); do (sleep 0.01 &); done", 60)
            assert (found.exit_code, found.pids_refused) == (0, 0)
        (first,) = children(backend.keeper_pid)
        assert await asyncio.to_thread(_without_dead, first)
        assert await told(backend, "a", "echo on") == "on\n"


def _shared(pid: int) -> list[str]:
    """Mounts that a process sees and others have a part in."""
    lines = Path(f"/proc/{pid}/mountinfo").read_text("utf-8").splitlines()
    assert lines
    return [line for line in lines if " shared:" in line or " master:" in line]


def _without_dead(parent: int) -> bool:
    """Whether all children of it that end are waited for, within 30 seconds."""
    deadline = time.monotonic() + 30
    while dead := [pid for pid in children(parent) if _state(pid) == "Z"]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return not dead


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return ""
