"""Pressure stall of real steps: a crowded host shows, a sleeping command does not."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from muster.types import Limits
from services.sandbox.adapters.native.backend import NativeBackend, open_native
from services.sandbox.box import JudgeSpec, PutFile

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="native boxes need root"),
]
ENV = {"PATH": "/usr/bin:/bin", "HOME": "/root"}


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[NativeBackend]:
    async with open_native(tmp_path / "run") as made:
        if not made.tells_stall:
            pytest.skip("this kernel tells no pressure stall")
        await made.start("a", Limits())
        await made.set_session("a", "/app", dict(ENV))
        yield made


BUSY = "i=0; while ((i < 300000)); do ((i += 1)); done"


@contextmanager
def crowded_host(count: int = 8) -> Iterator[None]:
    """Processes outside of all boxes that want every processor."""
    with ExitStack() as stack:
        for _ in range(count):
            # Each in a session of its own, as steps are: the kernel shares processors by session.
            spinner = subprocess.Popen(
                ["/usr/bin/bash", "-c", "echo on; while :; do :; done"],
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            stack.callback(spinner.wait)
            stack.callback(spinner.kill)
            assert spinner.stdout is not None
            stack.callback(spinner.stdout.close)
            spinner.stdout.readline()  # it runs
        yield


async def test_a_step_that_a_crowded_host_holds_up_says_so(backend: NativeBackend) -> None:
    alone = await backend.run("a", BUSY, 120)
    with crowded_host():
        crowded = await backend.run("a", BUSY, 120)
        asleep = await backend.run("a", "sleep 0.3", 120)
    assert crowded.cpu_stall_s > max(alone.cpu_stall_s, crowded.cpu_s)
    assert 0 <= asleep.cpu_stall_s < crowded.cpu_stall_s / 4


async def test_what_its_own_box_takes_from_a_step_counts_as_its_processor_time(
    backend: NativeBackend,
) -> None:
    # A step is starved when it waited longer than it computed (`starved`): so what the box's other
    # processes computed meanwhile counts for it. They get no less than it does, on any host.
    leave = "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do (while :; do :; done) & done >/dev/null 2>&1"
    await backend.run("a", leave, 20)
    late = await backend.run("a", f"{BUSY}; times", 120)
    own = sum(_seconds(word) for word in late.head.decode().split()[:2])
    assert late.cpu_s > 1.4 * own > 0


def _seconds(text: str) -> float:
    minutes, seconds = text.removesuffix("s").split("m")
    return 60 * int(minutes) + float(seconds)


async def test_a_verifier_that_a_crowded_host_holds_up_says_so(backend: NativeBackend) -> None:
    await backend.seal("a")
    script = PutFile("/tests/test.sh", 0o755, BUSY.encode())
    spec = JudgeSpec((script,), "/tests/test.sh", "/app", dict(ENV), 120, Limits())
    with crowded_host():
        evidence = (await backend.judge("a", spec)).evidence
    assert evidence.cpu_stall_s > evidence.cpu_s > 0
