"""Attacks on the time limit and on the verdict of a real box, each with its control.

The control is the same attempt in a box without the one defence, or the mistake that a rule warns
of; it must succeed, or the attack proves nothing. Attacks that end with an exit code:
test_attacks.py.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from muster.types import Limits
from services.sandbox.adapters.native.backend import NativeBackend, open_native
from services.sandbox.adapters.native.spawn import DEFENCES
from services.sandbox.box import JudgeSpec, PutFile

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="native boxes need root"),
]

ENV = {"PATH": "/usr/bin:/bin", "HOME": "/root"}
LIMITS = Limits(memory_bytes=256 << 20, pids=64, disk_bytes=32 << 20, disk_inodes=4096)


@asynccontextmanager
async def a_box(
    folder: Path, defences: frozenset[str] = DEFENCES, limits: Limits = LIMITS
) -> AsyncIterator[NativeBackend]:
    """A backend with one box named `a` in it."""
    async with open_native(folder / uuid.uuid4().hex[:8], defences=defences) as backend:
        await backend.start("a", limits)
        await backend.set_session("a", "/app", dict(ENV))
        yield backend


def alive(marker: str) -> list[int]:
    """Processes of this machine, in every namespace, with `marker` in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue  # it ended while we looked
            if marker.encode() in command:
                found.append(int(entry.name))
    return found


async def outlive(folder: Path, defences: frozenset[str]) -> tuple[int, int]:
    """How many processes of a timed-out step live on; and how many after the box has ended."""
    marker = f"4{uuid.uuid4().int % 10**9}"
    # One that ignores signals, one that leaves the session and the process group.
    command = f"trap '' TERM HUP INT; setsid sleep {marker} & sleep {marker}"
    async with a_box(folder, defences) as backend:
        found = await backend.run("a", command, 0.5)
        assert found.timed_out
        left = len(alive(marker))
        assert (await backend.run("a", "echo on", 10)).head == b"on\n"
    return left, len(alive(marker))


async def test_nothing_outlives_the_time_limit_of_its_step(tmp_path: Path) -> None:
    assert await outlive(tmp_path, DEFENCES) == (0, 0)
    control, after = await outlive(tmp_path, DEFENCES - {"kill"})
    assert after == 0
    assert control > 0, "killing the shell alone ended all of it: proves nothing"


async def judged(
    folder: Path, planting: str, test: str, defences: frozenset[str]
) -> dict[str, Any]:
    async with a_box(folder, defences) as backend:
        planted = await backend.run("a", planting, 20)
        assert planted.exit_code == 0, (planted.head + planted.tail).decode()
        await backend.seal("a")
        script = PutFile("/tests/test.sh", 0o755, test.encode())
        spec = JudgeSpec((script,), "/tests/test.sh", "/app", dict(ENV), 20, LIMITS)
        done = await backend.judge("a", spec)
        text = (done.evidence.head + done.evidence.tail).decode()
        return {"files": done.files, "problems": done.problems, "output": text}


PLANTED_VERDICT = (
    "mkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt"
    " && echo '{\"reward\": 1}' > /logs/verifier/reward.json"
)


async def test_a_planted_verdict_is_never_read(tmp_path: Path) -> None:
    defended = await judged(tmp_path, PLANTED_VERDICT, "exit 1", DEFENCES)
    assert defended["files"] == {}
    control = await judged(tmp_path, PLANTED_VERDICT, "exit 1", DEFENCES - {"verdict"})
    assert control["files"]["reward.txt"] == b"1\n"


@pytest.mark.parametrize(
    "planting",
    [
        "rm -rf /logs && mkdir /trap && ln -s /trap /logs && mkdir /trap/verifier",
        "mkdir -p /trap && rm -rf /tests && ln -s /trap /tests && echo 'exit 0' > /trap/test.sh",
        "rm /bin && mkdir /bin && printf '#!/usr/bin/bash\\necho evil' > /bin/sh"
        " && chmod 755 /bin/sh",
        "echo /no/such/library.so > /etc/ld.so.preload",
        "cp -r /usr/lib64 /l && rm /lib64 && mv /l /lib64 && printf x > /lib64/ld-linux-x86-64.so.2"
        " || true",
        "mkdir -p /etc/python3.11 && echo 'print(\"evil\")' > /etc/python3.11/sitecustomize.py",
        "mkdir -p /app/site && echo 'print(\"evil\")' > /app/json.py",
        "echo 'echo evil' > ~/.bashrc; echo 'echo evil' > ~/.profile;"
        " echo 'echo evil' > /etc/profile",
        "rm -rf /app && ln -s /etc /app",
        "rm -rf /app",
    ],
)
async def test_what_the_agent_planted_decides_nothing_in_the_verifier(
    planting: str, tmp_path: Path
) -> None:
    test = (
        "/bin/sh -c 'echo fine'; id -un; python3 -P -c 'import json';"
        " echo 0 > /logs/verifier/reward.txt"
    )
    found = await judged(tmp_path, planting, test, DEFENCES)
    assert found["output"] == "fine\nroot\n"
    assert found["files"] == {"reward.txt": b"0\n"}


@pytest.mark.parametrize(
    ("test", "problem"),
    [
        ("ln -s /etc/passwd /logs/verifier/reward.txt", "not a plain file"),
        ("mkfifo /logs/verifier/reward.txt", "not a plain file"),
        ("mkdir /logs/verifier/reward.txt", "not a plain file"),
        ("head -c 100000 /dev/zero > /logs/verifier/reward.txt", "over 65536 bytes"),
    ],
)
async def test_a_verdict_that_is_no_plain_small_file_is_not_followed(
    test: str, problem: str, tmp_path: Path
) -> None:
    found = await judged(tmp_path, "true", test, DEFENCES)
    assert found["files"] == {}
    assert problem in found["problems"]["reward.txt"]


async def test_an_agent_sees_nothing_of_the_host(tmp_path: Path) -> None:
    look = "cat /proc/*/cmdline /proc/*/environ /proc/self/mountinfo /proc/cmdline; ls /sys"
    async with a_box(tmp_path) as backend:
        found = await backend.run("a", look, 20)
    text = (found.head + found.tail).decode("utf-8", "replace")
    assert str(tmp_path) not in text
    assert "keeper" not in text


async def test_pid_1_cannot_be_killed_or_traced(tmp_path: Path) -> None:
    async with a_box(tmp_path) as backend:
        await backend.run("a", "kill -9 1; kill -INT 1; kill -TERM 1; kill -9 -1", 10)
        await backend.run("a", "cat /proc/1/mem; ls /proc/1/fd; echo x > /proc/1/oom_score_adj", 10)
        assert (await backend.run("a", "echo on", 10)).head == b"on\n"


async def test_a_program_of_the_agent_that_the_verifier_runs_as_nobody_cannot_write_the_verdict(
    tmp_path: Path,
) -> None:
    forging = "printf 'echo 1 > /logs/verifier/reward.txt; echo ran' > /app/run; chmod 755 /app/run"
    aside = "setpriv --reuid=nobody --regid=nogroup --clear-groups --inh-caps=-all --"
    test = "echo 0 > /logs/verifier/reward.txt; {} bash /app/run 2>/dev/null"
    defended = await judged(tmp_path, forging, test.format(aside), DEFENCES)
    assert defended["files"] == {"reward.txt": b"0\n"}
    assert defended["output"] == "ran\n"
    # The control, and the reason for the rule: run as root it forges its verdict.
    control = await judged(tmp_path, forging, test.format(""), DEFENCES)
    assert control["files"] == {"reward.txt": b"1\n"}


async def test_output_without_end_costs_what_its_limit_says(tmp_path: Path) -> None:
    flood = "yes | head -c 20M"
    for kept in (4096, 1 << 20):  # the second is the control: more is there to be kept
        limits = Limits(output_bytes=kept)
        async with a_box(tmp_path, limits=limits) as backend:
            found = await backend.run("a", flood, 20)
        assert found.total == 20 << 20
        assert len(found.head) + len(found.tail) == kept
