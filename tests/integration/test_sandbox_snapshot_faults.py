"""What may go wrong with snapshots of real boxes, and what is left then: nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from muster.errors import Unavailable
from muster.types import Limits
from services.sandbox.adapters.native.backend import NativeBackend, instance_of, open_native
from services.sandbox.box import BoxFailure, Source
from tests.integration.native_world import children, fresh, mounts, told

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="native boxes need root"),
]
MANY = Limits(disk_inodes=30000)
SLEEP = f"7{os.getpid()}.5"  # seconds, and a mark that no other process has


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[NativeBackend]:
    async with open_native(tmp_path / "run") as made:
        await fresh(made, "a")
        yield made


async def test_a_copy_that_does_not_fit_fails_and_the_box_goes_on(backend: NativeBackend) -> None:
    await told(backend, "a", "(while :; do echo $((++n)) > /app/n; sleep 0.01; done) & exit 0")
    frozen = Path(group_of("a", backend)) / "cgroup.freeze"
    # The keeper has no room of its own for it: the stage's folder for it is in the way.
    stage = Path(f"/proc/{backend.keeper_pid}/root{stage_of(backend)}")
    (stage / "l").mkdir(exist_ok=True)
    (stage / "l" / "1").write_text("in the way")
    with pytest.raises(BoxFailure):
        await backend.snapshot("a", "L-a", keep=True)
    assert frozen.read_text() == "0\n"
    assert (await backend.run("a", "exit 3", 10)).exit_code == 3
    await backend.snapshot("a", "L-a", keep=True)  # the name is free, the next folder too


def stage_of(backend: NativeBackend) -> str:
    return os.readlink(f"/proc/{backend.keeper_pid}/cwd")


def group_of(box: str, backend: NativeBackend) -> str:
    name = instance_of(Path(stage_of(backend)).parent)
    for path, _, _ in os.walk("/sys/fs/cgroup"):
        if path.endswith(f"muster-{name}/{box}/agent") and Path(path, "cgroup.freeze").exists():
            return path
    raise AssertionError("no group of the box")


async def full(backend: NativeBackend) -> None:
    """So many files that their copy takes a while, and a process that stands still meanwhile."""
    await backend.end("a")
    await fresh(backend, "a", limits=MANY)
    touch = "seq 20000 | xargs touch"
    assert await told(backend, "a", f"sleep {SLEEP} & {touch}; ls | wc -l") == "20000\n"


async def copying(backend: NativeBackend) -> int:
    """The child of the keeper that copies."""
    while True:
        for pid in children(backend.keeper_pid):
            if name_of(pid) == "muster-copy":
                return pid
        await asyncio.sleep(0)


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


async def test_a_killed_copy_fails_and_the_box_goes_on(backend: NativeBackend) -> None:
    await full(backend)
    frozen = Path(group_of("a", backend)) / "cgroup.freeze"

    async def snapshot() -> None:
        with pytest.raises(BoxFailure, match="L-a could not be made"):
            await backend.snapshot("a", "L-a", keep=True)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(snapshot())
        os.kill(await copying(backend), signal.SIGKILL)
    assert frozen.read_text() == "0\n"
    assert (await backend.run("a", "ls | wc -l", 10)).head == b"20000\n"
    assert mounts(backend.keeper_pid) == ["a"]


@pytest.mark.parametrize("how", ["end", "seal", "cancel"])
async def test_a_box_that_ends_while_it_is_copied_leaves_nothing_of_the_copy(
    how: str, backend: NativeBackend
) -> None:
    await full(backend)

    async def snapshot() -> None:
        with pytest.raises(BoxFailure):
            await backend.snapshot("a", "L-a", keep=True)

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(snapshot())
        await copying(backend)
        if how == "cancel":
            task.cancel()
        else:
            await getattr(backend, how)("a")
    assert await backend.drop("L-a") is False
    assert mounts(backend.keeper_pid) == ([] if how == "end" else ["a"])
    await backend.end("a")
    assert mounts(backend.keeper_pid) == []
    assert children(backend.keeper_pid) == []


async def test_dropped_snapshots_leave_no_mount(backend: NativeBackend) -> None:
    await told(backend, "a", "echo x > x")
    await backend.snapshot("a", "L-a", keep=True)
    await backend.squash("L-a", "L-b")
    assert len(mounts(backend.keeper_pid)) == 3
    await backend.end("a")
    await backend.drop("L-a")
    await backend.drop("L-b")
    assert mounts(backend.keeper_pid) == []


SERVICE = """
import asyncio, sys
from pathlib import Path
from muster.types import Limits
from services.sandbox.adapters.native.backend import open_native
from services.sandbox.box import Source

async def main():
    async with open_native(Path(sys.argv[1])) as backend:
        await backend.start("a", Limits())
        await backend.run("a", "mkdir /app; echo below > /app/below", 20)
        await backend.snapshot("a", "L-a", keep=False)
        await backend.start("b", Limits(), Source(layer="L-a"))
        await backend.snapshot("b", "L-b", keep=True)
        await backend.note("b", b"mine")
        await backend.start("unnoted", Limits(), Source(layer="L-b"))
        print("there", flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""


async def test_of_a_killed_service_s_snapshots_a_successor_has_those_that_its_boxes_lie_on(
    tmp_path: Path,
) -> None:
    service = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", SERVICE, str(tmp_path / "run")),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert service.stdout
    assert await service.stdout.readline() == b"there\n"
    service.kill()
    await service.wait()
    async with open_native(tmp_path / "run") as backend:
        assert [each.box for each in await backend.survivors()] == ["b"]
        await backend.claim(("L-a",))
        assert sorted(mounts(backend.keeper_pid)) == ["b", "l/1"]  # L-b and its box have gone
        assert await told(backend, "b", "cat /app/below") == "below\n"
        with pytest.raises(BoxFailure, match="L-a exists"):
            await backend.snapshot("b", "L-a", keep=True)
        await backend.end("b")
        await backend.start("c", Limits(), Source(layer="L-a"))  # the successor has it now
        assert await told(backend, "c", "cat /app/below") == "below\n"
        await backend.end("c")
        assert await backend.drop("L-a") is True
        assert mounts(backend.keeper_pid) == []


async def test_a_stopped_host_leaves_no_snapshot(tmp_path: Path) -> None:
    async with open_native(tmp_path / "run") as backend:
        await fresh(backend, "a")
        await backend.snapshot("a", "L-a", keep=True)
        await fresh(backend, "b", "L-a")
        keeper = backend.keeper_pid
        assert len(mounts(keeper)) == 3
    assert str(keeper) not in os.listdir("/proc")
    assert os.listdir(tmp_path) == []


async def test_a_keeper_killed_while_it_copies_leaves_no_process_that_stands_still(
    tmp_path: Path,
) -> None:
    async def snapshot(backend: NativeBackend) -> None:
        with pytest.raises(BoxFailure):
            await backend.snapshot("a", "L-a", keep=True)

    async def block() -> None:
        async with open_native(tmp_path / "run") as backend:
            await fresh(backend, "a")
            await full(backend)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(snapshot(backend))
                await copying(backend)
                assert len(sleeping()) == 1
                os.kill(backend.keeper_pid, signal.SIGKILL)

    with pytest.raises(Unavailable):
        await block()
    async with open_native(tmp_path / "run"):  # it sweeps
        assert sleeping() == []


def sleeping() -> list[str]:
    return [pid for pid in os.listdir("/proc") if pid.isdecimal() and SLEEP in command_of(pid)]


def command_of(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
