"""Whatever ends a service, its processes and its shared memory end with it (muster/isolate.py)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.root
WAIT_S = 10.0
# Enters, leaves shared memory and a grandchild in a session of its own, and says "ready".
SERVICE = """
import os, subprocess, sys
from muster import isolate
strong = isolate.enter()
name = os.environ["MUSTER_TEST_MARK"]
open(f"/dev/shm/{name}", "w").write("left behind")
sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
subprocess.Popen(sleeper, start_new_session=True, stdin=subprocess.DEVNULL)
print("ready", strong, os.getpid(), len(os.listdir("/proc/self/task")), flush=True)
import time
time.sleep(600)
"""


class Service:
    def __init__(self) -> None:
        self.mark = f"muster-test-{uuid.uuid4().hex}"
        self.starter = subprocess.Popen(
            [sys.executable, "-c", SERVICE],
            env=os.environ | {"MUSTER_TEST_MARK": self.mark},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.starter.stdout is not None
        self.says = self.starter.stdout.readline().split()

    def alive(self) -> list[int]:
        """Processes that carry the mark, the starter among them."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (path / "environ").read_bytes():
                    found.append(int(path.name))
            except OSError:
                continue
        return found


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.starter.kill()
    made.starter.wait()
    assert made.starter.stdout is not None
    made.starter.stdout.close()


def until(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not check():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_the_service_is_alone_in_its_namespace(service: Service) -> None:
    assert service.says == ["ready", "True", "1", "1"]
    assert len(service.alive()) == 3
    assert not Path("/dev/shm", service.mark).exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ending_the_starter_ends_everything(service: Service, number: int) -> None:
    service.starter.send_signal(number)

    until(lambda: service.alive() == [])
    assert service.starter.wait() == (-number if number == signal.SIGKILL else 128 + number)


def test_killing_the_service_ends_everything_and_tells_the_starter(service: Service) -> None:
    inner = min(pid for pid in service.alive() if pid != service.starter.pid)
    os.kill(inner, signal.SIGKILL)

    assert service.starter.wait(WAIT_S) == 128 + signal.SIGKILL
    until(lambda: service.alive() == [])


def test_a_failpoint_kills_the_first_process_of_a_namespace_too() -> None:
    """It ignores a SIGKILL that it sends itself: so an isolated engine outlived its faults."""
    code = (
        "import asyncio; from muster import failpoints; "
        "asyncio.run(failpoints.at('inference.prepare.before')); print('alive')"
    )
    environment = os.environ | {"MUSTER_TEST_FAILPOINTS": "inference.prepare.before=kill"}
    found = subprocess.run(
        ["unshare", "--pid", "--fork", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert (found.returncode, found.stdout) == (137, ""), found.stderr
