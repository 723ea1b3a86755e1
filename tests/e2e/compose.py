"""The whole in containers: built, run, scaled, wounded, restarted, taken down, nothing left.

    python tests/e2e/compose.py [--build] [--only STORY …] [--keep] [--json FILE]

Needs a Docker Engine and Compose (v2 or 1.29); says so and ends with status 0 where there is none.
BASE_IMAGE and REDIS_IMAGE name other images than the usual ones (deploy/local-images.sh makes
some). With MODELS naming a folder that holds models/smollm2-135m-instruct nothing is fetched.

Stories, each on a fresh project of its own name:
  whole    a job of four groups: one step, one publication, a clean audit
  scaled   two replicas and two hosts from the middle on; one of each killed; each had trained turns
  rolling  every service restarted once under load; no episode is lost
Exit status: 0, 1 when a story failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

GROUPS, SIBLINGS = 4, 4
ROUTER = "127.0.0.1:7411"
_UP_S, _JOB_S, _CALL_S = 1200.0, 1500.0, 120.0
SERVICES = ("redis", "readybank", "router", "sandbox", "inference", "trainer")


class Skipped(Exception):
    """Why nothing can be tried here."""


class Failed(Exception):
    """What was not as promised."""


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


class Project:
    """One project of compose: its containers, network and volumes carry its name."""

    def __init__(self, name: str, **variables: str):
        self.name = name
        self.compose = [*compose_command(), "-p", name]
        self.environment = dict(os.environ, ROUTER_AT=ROUTER, **variables)
        self.seconds: dict[str, float] = {}

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
        begin = time.monotonic()
        self.run("up", "-d", "--no-build", *more, within_s=_UP_S)
        self.seconds["up"] = round(time.monotonic() - begin, 1)

    def ids(self, service: str) -> list[str]:
        return self.run("ps", "-q", service).split()

    def command(self, *words: str) -> tuple[int, str]:
        """`muster …` in a container of its own beside the services."""
        call = [*self.compose, "run", "--rm", "-T", "client", *words]
        done = subprocess.run(
            call, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False,
            timeout=_CALL_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    def submit(self, groups: int = GROUPS) -> subprocess.Popen[str]:
        """From this machine, through the published port; follows the job to its end."""
        return subprocess.Popen(
            [sys.executable, "-m", "muster.cli.main", "submit", "tasks/", "--groups", str(groups),
             "--group-size", str(SIBLINGS), "--router", ROUTER, "--wait", "--json"],
            cwd=ROOT, stdout=subprocess.PIPE, text=True, env=_plain(),
        )  # fmt: skip

    def down(self) -> None:
        self.run("down", "-v", "--remove-orphans", "-t", "60", within_s=_JOB_S)

    def left(self) -> list[str]:
        """What of this project is still there."""
        found = []
        for kind, listing in (
            ("container", ["ps", "-aq"]),
            ("network", ["network", "ls", "-q"]),
            ("volume", ["volume", "ls", "-q"]),
        ):
            label = f"label=com.docker.compose.project={self.name}"
            found += [f"{kind} {one}" for one in docker(*listing, "--filter", label).split()]
        return found + [f"cgroup {path}" for path in _cgroups()]


def _plain() -> dict[str, str]:
    """The environment without settings of Muster: the client on the machine needs none."""
    return {k: v for k, v in os.environ.items() if not k.startswith("MUSTER_")}


def _cgroups() -> list[str]:
    """Boxes' groups below an engine's: they go with the container."""
    found = []
    for folder, names, _ in os.walk("/sys/fs/cgroup"):
        if "/docker/" in folder:
            found += [f"{folder}/{name}" for name in names if name.startswith("muster-")]
    return found


def docker(*words: str) -> str:
    done = subprocess.run(["docker", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"docker {' '.join(words)}: {done.stderr[-500:]}")
    return done.stdout


def followed(job: subprocess.Popen[str], seen: Callable[[dict[str, Any]], None]) -> None:
    """Read a job's progress to its end; `seen` gets each line. Raises Failed."""
    assert job.stdout is not None
    with job:
        for text in job.stdout:
            seen(json.loads(text))
    if job.returncode:
        raise Failed(f"muster submit ended with status {job.returncode}")


def audited(project: Project) -> dict[str, Any]:
    """The audit has to be clean. Answers its totals."""
    status, text = project.command("muster", "audit", "--json")
    start = text.find("{")
    if status or start < 0:
        raise Failed(f"muster audit: {text[-1500:]}")
    found: dict[str, Any]
    found, _ = json.JSONDecoder().raw_decode(text, start)
    return found


# Runs in a container: which replica and which host each turn of a trained group came from.
_TURNS = """
import asyncio, collections, json, os
from muster.attach import attached
from muster.config import load_config
from muster.record import read_record

async def read(config):
    async with attached(config) as redis:
        return await read_record(redis, config.run, config.history(config.run))

record = asyncio.run(read(load_config(None, os.environ)))
trained = {member.group for batch in record.batches if batch.trained for member in batch.members}
turns = [turn for turn in record.turns if turn.key.group in trained]
print("TURNS", json.dumps({
    "replicas": collections.Counter(turn.replica for turn in turns),
    "hosts": collections.Counter(turn.host for turn in turns if turn.host),
    "attempts": collections.Counter(turn.key.attempt for turn in turns),
    "restored": len(record.restored),
    "versions": [v.version for v in record.versions],
}))
"""


def recorded(project: Project) -> dict[str, Any]:
    """Where trained turns came from. Raises Failed."""
    status, text = project.command("python", "-c", _TURNS)
    line = next((one for one in text.splitlines() if one.startswith("TURNS ")), "")
    if status or not line:
        raise Failed(f"cannot read the record: {text[-1500:]}")
    found: dict[str, Any] = json.loads(line.removeprefix("TURNS "))
    return found


def trained(totals: dict[str, Any], groups: int) -> None:
    """Every group of the jobs has one fate: it was trained."""
    counts = totals["totals"]
    told = (counts["groups"], counts["groups_trained"], counts["groups_open"])
    if told != (groups, groups, 0):
        raise Failed(f"groups, trained, open: {told}, not {groups}, {groups}, 0")


@contextmanager
def project(name: str, keep: bool, **variables: str) -> Iterator[Project]:
    """Taken down at the end, with its logs told when something failed."""
    one = Project(name, **variables)
    one.down()
    try:
        yield one
    except Exception:
        say(one.run("logs", "--tail", "30", check=False)[-12_000:])
        raise
    finally:
        if not keep:
            one.down()
            if left := one.left():
                raise Failed(f"left after down -v: {left}")


def whole(keep: bool) -> dict[str, Any]:
    """A job of four groups from the machine: one optimizer step, one publication."""
    with project("muster-whole", keep) as one:
        one.up()
        begin = time.monotonic()
        followed(one.submit(), lambda line: None)
        seconds = round(time.monotonic() - begin, 1)
        totals = audited(one)
        trained(totals, GROUPS)
        turns = recorded(one)
        if 1 not in turns["versions"]:
            raise Failed(f"no version was published: {turns['versions']}")
        return {"seconds": one.seconds | {"job": seconds}, "totals": totals["totals"], **turns}


def scaled(keep: bool) -> dict[str, Any]:
    """Two of each while a job runs, without a restart of the router; then one of each killed."""
    with project("muster-scaled", keep, COMPOSE_PROFILES="cpu", SETTINGS=_small()) as one:
        one.up()
        router = one.ids("router")
        groups = 3 * GROUPS
        job = one.submit(groups)
        one.up("--no-recreate", "--scale", "inference=2", "--scale", "sandbox=2")
        if one.ids("router") != router:
            raise Failed("the router was replaced by scaling")
        doomed = [one.ids(service)[0] for service in ("inference", "sandbox")]
        victims: list[str] = []

        def at(line: dict[str, Any]) -> None:
            # Both have had work in a trained batch, and episodes of the next one run.
            busy = line.get("episodes_running", 0) >= SIBLINGS
            if victims or not busy or line.get("groups_trained", 0) < GROUPS:
                return
            # A container that is killed by hand is not started again: its work goes to the other.
            docker("kill", "-s", "KILL", *doomed)
            victims.extend(doomed)

        followed(job, at)
        totals = audited(one)
        trained(totals, groups)
        turns = recorded(one)
        for kind in ("replicas", "hosts"):
            if len(turns[kind]) < 2:
                raise Failed(f"trained turns came from one of the {kind} only: {turns[kind]}")
        if not victims:
            raise Failed("the job was over before anything was killed")
        return {"killed": victims, "totals": totals["totals"], **turns}


def rolling(keep: bool) -> dict[str, Any]:
    """Each service is restarted once, one after the other, while a job runs."""
    with project("muster-rolling", keep, COMPOSE_PROFILES="cpu", SETTINGS=_small()) as one:
        one.up()
        took: dict[str, float] = {}
        waiting = [*SERVICES]
        turns_at = [0]
        groups = 4 * GROUPS

        def at(line: dict[str, Any]) -> None:
            if not waiting or line.get("turns", 0) < turns_at[0] + SIBLINGS:
                return  # there is work between two restarts
            service = waiting.pop(0)
            begin = time.monotonic()
            one.run("restart", "-t", "30", service, within_s=_UP_S)
            took[service] = round(time.monotonic() - begin, 1)
            turns_at[0] = line["turns"]

        followed(one.submit(groups), at)
        if waiting:
            raise Failed(f"the job was over before these were restarted: {waiting}")
        totals = audited(one)
        trained(totals, groups)
        return {"seconds": one.seconds | took, "totals": totals["totals"], **recorded(one)}


def _small() -> str:
    """Two engines on one machine: a small cache and one thread each."""
    folder = ROOT / ".muster" / "compose"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "small.env"
    path.write_text(
        "MUSTER_INFERENCE__THREADS=1\nMUSTER_INFERENCE__KV_CACHE_GIB=0.25\n", encoding="utf-8"
    )
    return str(path)


STORIES: dict[str, Callable[[bool], dict[str, Any]]] = {
    "whole": whole,
    "scaled": scaled,
    "rolling": rolling,
}


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - the answer


def _build() -> None:
    one = Project("muster-build")
    for service in ("router", "model"):  # base, cpu
        one.run("build", service, within_s=3 * _UP_S)


def _ready() -> None:
    """Raises Skipped."""
    compose_command()
    try:
        docker("version", "--format", "{{.Server.Version}}")
    except Failed as error:
        raise Skipped(f"no Docker Engine answers: {error}") from error


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--build", action="store_true", help="make the images first")
    parser.add_argument("--only", action="append", choices=[*STORIES], help="one story, or several")
    parser.add_argument("--keep", action="store_true", help="leave the containers running")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    options = parser.parse_args()
    try:
        _ready()
    except Skipped as reason:
        say(f"skipped: {reason}")
        return 0
    found: dict[str, Any] = {}
    status = 0
    if options.build:
        _build()
    for name in options.only or STORIES:
        begin = time.monotonic()
        try:
            found[name] = STORIES[name](options.keep)
            told = "ok"
        except (Failed, subprocess.TimeoutExpired) as error:
            found[name], told, status = {"failed": str(error)}, f"FAILED: {error}", 1
        say(f"{name}: {told} ({time.monotonic() - begin:.0f} s)")
        say(json.dumps(found[name]))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
