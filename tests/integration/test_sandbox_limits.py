"""Each limit of a real box strikes, is told by the kernel's counters, and leaves the box usable."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from muster.outcome import starved
from muster.types import Limits, StepLimit
from services.sandbox.adapters.native.backend import NativeBackend, open_native
from services.sandbox.box import Evidence, JudgeSpec, PutFile
from services.sandbox.ledger import which_limit

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="native boxes need root"),
]
ENV = {"PATH": "/usr/bin:/bin", "HOME": "/root"}
MIB = 1 << 20
LIMITS = Limits(64 * MIB, 32, 8 * MIB, 300, 4096)


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[NativeBackend]:
    async with open_native(tmp_path / "run") as made:
        await made.start("a", LIMITS)
        await made.set_session("a", "/app", dict(ENV))
        yield made


def output(found: Evidence) -> str:
    return (found.head + found.tail).decode("utf-8", "replace")


EAT = "python3 -c 'bytearray(200 << 20)'"


@pytest.mark.parametrize(
    ("command", "exit_code"),
    [
        (f"{EAT}; exit 0", 0),  # the shell lives, and its exit code tells nothing
        (f"{EAT} || exit 3", 3),
        (f"exec {EAT}", 137),
        (f"{EAT} & wait", 0),
    ],
)
async def test_memory_is_told_by_the_kernel_s_counter_whatever_the_exit_code(
    command: str, exit_code: int, backend: NativeBackend
) -> None:
    found = await backend.run("a", command, 30)
    assert (found.oom_kills >= 1, found.exit_code) == (True, exit_code)
    # A step that succeeds all the same was ended by no limit.
    assert which_limit(found) is (StepLimit.MEMORY if exit_code else StepLimit.NONE)
    assert output(await backend.run("a", "echo on", 10)) == "on\n"


@pytest.mark.parametrize(
    ("command", "timeout_s", "limit"),
    [
        ("exit 137", 10.0, StepLimit.NONE),
        ("kill -9 $$", 10.0, StepLimit.NONE),
        ("sleep 50 & kill -9 $!; wait $!", 10.0, StepLimit.NONE),
        ("echo Killed; echo Out of memory; exit 137", 10.0, StepLimit.NONE),
        ("sleep 50", 0.3, StepLimit.TIME),  # killed by us, with 137
    ],
)
async def test_a_death_by_another_hand_is_not_told_as_out_of_memory(
    command: str, timeout_s: float, limit: StepLimit, backend: NativeBackend
) -> None:
    found = await backend.run("a", command, timeout_s)
    assert (found.oom_kills, found.exit_code) == (0, 137)
    assert which_limit(found) is limit


async def test_files_in_memory_count_as_memory(tmp_path: Path) -> None:
    async with open_native(tmp_path / "run") as made:
        await made.start("a", Limits(32 * MIB, 32, 256 * MIB, 300, 4096))
        found = await made.run("a", "head -c 128M /dev/zero > /tmp/x; exit 0", 30)
        assert (which_limit(found), found.disk_full) == (StepLimit.MEMORY, False)


async def test_processes_are_bounded_and_counted(backend: NativeBackend) -> None:
    fork = "python3 -c 'import os, time\nfor _ in range(99): os.fork() or time.sleep(9)'"
    found = await backend.run("a", fork, 30)
    assert found.pids_refused >= 1
    assert which_limit(found) is StepLimit.PIDS
    await backend.run("a", "kill -9 -1", 10)
    assert output(await backend.run("a", "(echo on) | cat", 10)) == "on\n"


@pytest.mark.parametrize(
    "fill",
    [
        "head -c 20M /dev/zero > /tmp/fill",
        "for i in $(seq 600); do : > /tmp/$i || exit 1; done 2>/dev/null",
        "for i in $(seq 600); do mkdir /tmp/d$i || exit 1; done 2>/dev/null",
    ],
)
async def test_the_disk_is_bounded_in_bytes_and_in_files(fill: str, backend: NativeBackend) -> None:
    found = await backend.run("a", fill, 30)
    assert found.exit_code != 0
    assert which_limit(found) is StepLimit.DISK
    # The next step has a session again, though the disk is full.
    after = await backend.run("a", "rm -rf /tmp/*; echo on > /tmp/x; cat /tmp/x", 10)
    assert (output(after), which_limit(after)) == ("on\n", StepLimit.NONE)


async def test_a_box_may_use_all_that_it_was_given(backend: NativeBackend) -> None:
    within = (
        "head -c 7M /dev/zero > /tmp/fill && for i in $(seq 250); do : > /tmp/$i || exit 1; done"
        " && python3 -c 'bytearray(30 << 20)'"
    )
    found = await backend.run("a", within, 30)
    assert (found.exit_code, which_limit(found)) == (0, StepLimit.NONE)


BUSY = "for i in 1 2 3 4; do (while :; do :; done) & done; wait"


async def limited(backend: NativeBackend, cpus: float) -> None:
    if not backend.limits_cpu:
        pytest.skip("this host has no cpu controller")
    await backend.start("slow", Limits(cpus=cpus))
    await backend.set_session("slow", "/app", dict(ENV))


@pytest.mark.parametrize("cpus", [0.1, 0.02])
async def test_processors_are_bounded_for_all_processes_of_a_box_together(
    cpus: float, backend: NativeBackend
) -> None:
    await limited(backend, cpus)
    found = await backend.run("slow", BUSY, 3.0)
    assert found.timed_out
    # One period's share may be used up before the first is over; ending takes processor time too.
    assert 0 < found.cpu_s < cpus * (found.wall_s + 0.2) + 0.02


async def test_a_command_that_its_own_processor_limit_holds_up_is_not_told_as_starved(
    backend: NativeBackend,
) -> None:
    await limited(backend, 0.01)
    late = await backend.run("slow", "while :; do :; done", 2.0)
    assert late.timed_out
    assert not starved(late.wall_s, late.cpu_s, late.cpu_stall_s)


async def test_what_an_earlier_step_left_running_shares_the_limit(backend: NativeBackend) -> None:
    await limited(backend, 0.05)
    await backend.run("slow", "(while :; do :; done) >/dev/null 2>&1 &", 10)
    found = await backend.run("slow", BUSY, 2.0)
    assert found.cpu_s < 0.05 * (found.wall_s + 0.2) + 0.02


async def test_a_verifier_has_the_same_processor_limit(backend: NativeBackend) -> None:
    await limited(backend, 0.05)
    await backend.seal("slow")
    script = PutFile("/tests/test.sh", 0o755, BUSY.encode())
    spec = JudgeSpec((script,), "/tests/test.sh", "/", dict(ENV), 2.0, Limits(cpus=0.05))
    evidence = (await backend.judge("slow", spec)).evidence
    assert evidence.timed_out
    assert evidence.cpu_s < 0.05 * (evidence.wall_s + 0.2) + 0.02


async def test_nothing_is_left_of_the_groups_that_limited_a_box(
    backend: NativeBackend, tmp_path: Path
) -> None:
    await limited(backend, 0.5)

    def groups() -> list[str]:
        return [p for p, _, _ in os.walk("/sys/fs/cgroup") if p.endswith(("/slow", "/slow/agent"))]

    mine = len([path for path in groups() if path.endswith("/slow")])
    assert mine >= 2  # the v2 one, and one with a controller
    await backend.end("slow")
    assert groups() == []
