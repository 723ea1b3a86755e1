"""One project of Compose, for the stories of compose.py: up, asked, hurt, down, and what is left.

Owns: calls of `docker` and Compose, each bounded in time, and what is told while they run. Does not
cover: what has to be true (compose.py).
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from services.sandbox.adapters.native.backend import instance_of

ROOT = Path(__file__).resolve().parents[2]
SIBLINGS = 4
ROUTER = "127.0.0.1:7411"
SERVICES = ("redis", "readybank", "router", "sandbox", "inference", "trainer")
IMAGES = {"readybank": "base", "model": "cpu"}  # the services whose `build:` makes them
_UP_S, _BUILD_S, _JOB_S, _CALL_S = 1200.0, 3600.0, 1500.0, 120.0
_TICK_S = 1.0
_COUNTS = ("episodes_running", "turns", "groups_complete", "groups_trained")
Line = dict[str, Any]


class Skipped(Exception):
    """Why nothing can be tried here."""


class Failed(Exception):
    """What was not as promised."""


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - the answer


def compose_command() -> list[str]:
    """Compose v2, else 1.29. Raises Skipped."""
    if not shutil.which("docker"):
        raise Skipped("there is no docker command")
    for words in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(words[0]):
            asked = subprocess.run([*words, "version"], capture_output=True, check=False)
            if asked.returncode == 0:
                return words
    raise Skipped("there is no Compose (docker compose, or docker-compose 1.29)")


def docker(*words: str) -> str:
    done = subprocess.run(
        ["docker", *words], capture_output=True, text=True, check=False, timeout=_CALL_S
    )
    if done.returncode:
        raise Failed(f"docker {' '.join(words)}: {done.stderr[-500:]}")
    return done.stdout


def build() -> None:
    """Both images, with the builder's own lines. Raises Failed."""
    for service, image in IMAGES.items():
        call = [*compose_command(), "build", service]
        say(f"== image {image}: {' '.join(call)}")
        begin = time.monotonic()
        done = subprocess.run(
            call, cwd=ROOT, check=False, timeout=_BUILD_S, stdin=subprocess.DEVNULL
        )
        if done.returncode:
            raise Failed(f"{' '.join(call)} ended with status {done.returncode}")
        say(f"== image {image}: made in {time.monotonic() - begin:.0f} s")


class Job:
    """A submitted job. A thread reads its progress, so that lines from before a call of Compose,
    which takes seconds, are not taken for what is now."""

    def __init__(self, process: subprocess.Popen[str], tell: Callable[[str], None]):
        self._process, self._tell = process, tell
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="job", daemon=True)
        self._reader.start()
        self._told: Line = {}

    def follow(self, seen: Callable[[Line], None], within_s: float = _JOB_S) -> None:
        """To its end; `seen` gets the newest progress whenever there is some. Raises Failed."""
        until = time.monotonic() + within_s
        try:
            while self._reader.is_alive() or not self._lines.empty():
                if time.monotonic() > until:
                    raise Failed(f"the job had not ended after {within_s:.0f} s: {self._told}")
                if line := self._newest():
                    self._show(line)
                    seen(line)
            if status := self._process.wait(_CALL_S):
                raise Failed(f"muster submit ended with status {status}")
        finally:
            self._process.kill()  # without effect on one that has ended
            self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for text in lines:
                self._lines.put(text)

    def _newest(self) -> Line:
        """Empty when there is none; the last line of all is never skipped."""
        try:
            text = self._lines.get(timeout=_TICK_S)
        except queue.Empty:
            return {}
        while not self._lines.empty():
            text = self._lines.get()
        line: Line = json.loads(text)
        return line if "turns" in line else {}

    def _show(self, line: Line) -> None:
        """When a group is complete or trained."""
        before, self._told = self._told, {name: line[name] for name in _COUNTS}
        if any(before.get(name) != self._told[name] for name in _COUNTS[2:]):
            self._tell(
                f"of {line['groups_total']} groups {line['groups_complete']} complete, "
                f"{line['groups_trained']} trained; {line['turns']} turns so far, "
                f"{line['episodes_running']} episodes running, version {line['policy_version']}"
            )


class Project:
    """One project of compose: its containers, network and volumes carry its name."""

    def __init__(self, name: str, **variables: str):
        self.name = name
        self.compose = [*compose_command(), "-p", name]
        self.environment = dict(os.environ, ROUTER_AT=ROUTER, **variables)
        self.seconds: dict[str, float] = {}
        self._begin = time.monotonic()
        self._box_groups: set[str] = set()

    def tell(self, text: str) -> None:
        say(f"{time.monotonic() - self._begin:6.0f} s  {text}")

    def run(self, *words: str, within_s: float = _CALL_S, check: bool = True) -> str:
        """A command of compose; its output. Raises Failed with its last lines."""
        call = [*self.compose, *words]
        done = subprocess.run(
            call, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False,
            timeout=within_s, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if check and done.returncode:
            raise Failed(f"{' '.join(call)}: {(done.stdout + done.stderr)[-1500:]}")
        return done.stdout

    def up(self, *more: str) -> None:
        words = ["up", "-d", "--no-build", *more]
        self.tell(f"{' '.join([*self.compose, *words])} (minutes, while an engine loads)")
        begin = time.monotonic()
        self.run(*words, within_s=_UP_S)
        self.seconds["up"] = round(time.monotonic() - begin, 1)
        self.tell(f"it came back after {self.seconds['up']:.0f} s")

    def restart(self, service: str) -> float:
        """As docs/deploy.md has it; seconds until Compose came back."""
        begin = time.monotonic()
        self.run("restart", service, within_s=_UP_S)
        return round(time.monotonic() - begin, 1)

    def ids(self, service: str) -> list[str]:
        return self.run("ps", "-q", service).split()

    def started(self, service: str) -> str:
        """Changes when a container is replaced, and when one that died was started again."""
        return docker("inspect", "-f", "{{.Id}} {{.State.StartedAt}}", *self.ids(service))

    def healthy(self) -> int:
        """How many containers serve, as their health checks say; a restarted one begins anew."""
        return len(self._listed("ps", "-q", "--filter", "health=healthy"))

    def command(self, *words: str) -> tuple[int, str]:
        """`muster …` in a container of its own beside the services."""
        call = [*self.compose, "run", "--rm", "-T", "client", *words]
        done = subprocess.run(
            call, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False,
            timeout=_CALL_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    def submit(self, groups: int) -> Job:
        """From this machine, through the published port."""
        words = ["submit", "tasks/", "--groups", str(groups), "--group-size", str(SIBLINGS),
                 "--router", ROUTER, "--wait"]  # fmt: skip
        self.tell(f"muster {' '.join(words)}")
        process = subprocess.Popen(
            [sys.executable, "-m", "muster.cli.main", *words, "--json"],
            cwd=ROOT, stdout=subprocess.PIPE, text=True, env=_plain(),
        )  # fmt: skip
        return Job(process, self.tell)

    def down(self) -> None:
        for one in self._listed(
            "ps", "-aq", "--filter", "label=com.docker.compose.service=sandbox"
        ):
            folder = Path("/run/muster") / one[:12]  # the container's HOSTNAME
            self._box_groups.add(f"muster-{instance_of(folder)}")
        self.run("down", "-v", "--remove-orphans", within_s=_JOB_S)

    def left(self) -> list[str]:
        """What of this project is still there."""
        found = [f"container {one}" for one in self._listed("ps", "-aq")]
        found += [f"network {one}" for one in self._listed("network", "ls", "-q")]
        found += [f"volume {one}" for one in self._listed("volume", "ls", "-q")]
        for folder, names, _ in os.walk("/sys/fs/cgroup"):
            found += [f"cgroup {folder}/{one}" for one in self._box_groups.intersection(names)]
        return found

    def _listed(self, *words: str) -> list[str]:
        label = f"label=com.docker.compose.project={self.name}"
        return docker(*words, "--filter", label).split()


def _plain() -> dict[str, str]:
    """The environment without settings of Muster: the client on the machine needs none."""
    return {k: v for k, v in os.environ.items() if not k.startswith("MUSTER_")}


@contextmanager
def project(name: str, keep: bool, **variables: str) -> Iterator[Project]:
    """Taken down at the end, with its logs told when something failed."""
    one = Project(name, **variables)
    one.down()
    try:
        yield one
    except BaseException as error:
        if isinstance(error, Exception):
            say(one.run("logs", "--tail", "30", check=False)[-12_000:])
        if not keep:
            one.run("down", "-v", "--remove-orphans", within_s=_JOB_S, check=False)
        raise
    if not keep:
        one.tell("down -v")
        one.down()
        if left := one.left():
            raise Failed(f"left after down -v: {left}")
        one.tell("nothing left: no container, network, volume, control group of a box")
