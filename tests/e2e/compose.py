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
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.e2e.compose_project import (
    ROOT,
    SERVICES,
    SIBLINGS,
    Failed,
    Line,
    Project,
    Skipped,
    build,
    compose_command,
    docker,
    project,
    say,
)

GROUPS = 4  # of a batch
_GROUPS_MAX = 12 * GROUPS  # that a story submits until it has found its moments
_PUBLISHED_S = 120.0


def audited(project: Project) -> dict[str, Any]:
    """The audit has to be clean. Answers its totals."""
    status, text = project.command("muster", "audit", "--json")
    start = text.find("{")
    if status or start < 0:
        raise Failed(f"muster audit: {text[-1500:]}")
    found: dict[str, Any]
    found, _ = json.JSONDecoder().raw_decode(text, start)
    project.tell("muster audit: clean")
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
    "published": {v.version: [p.replica for p in v.publications if not p.error]
                  for v in record.versions if v.published},
}))
"""


def recorded(project: Project) -> dict[str, Any]:
    """Where trained turns came from, and where versions went to. Raises Failed."""
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


def whole(keep: bool) -> dict[str, Any]:
    """A job of four groups from the machine: one optimizer step, one publication."""
    with project("muster-whole", keep) as one:
        one.up()
        begin = time.monotonic()
        one.submit(GROUPS).follow(lambda line: None)
        seconds = round(time.monotonic() - begin, 1)
        totals = audited(one)
        trained(totals, GROUPS)
        # The job ends with its groups' fates; the replicas' answers are recorded after that.
        until = time.monotonic() + _PUBLISHED_S
        while not (turns := recorded(one))["published"].get("1"):
            if time.monotonic() > until:
                raise Failed(f"version 1 reached no replica: {turns['published']}")
        return {"seconds": one.seconds | {"job": seconds}, "totals": totals["totals"], **turns}


def scaled(keep: bool) -> dict[str, Any]:
    """Two of each while a job runs, without a restart of the router; then one of each killed."""
    with project("muster-scaled", keep, COMPOSE_PROFILES="cpu", SETTINGS=_small()) as one:
        one.up()
        router = one.started("router")
        old = [one.ids(service)[0] for service in ("inference", "sandbox")]
        groups = 3 * GROUPS
        job = one.submit(groups)
        one.up("--no-recreate", "--scale", "inference=2", "--scale", "sandbox=2")
        opened: list[int] = []  # groups of the job when two of each served
        killed: list[str] = []

        def at(line: Line) -> None:
            if not opened:
                if one.healthy() == len(SERVICES) + 2:
                    opened.append(line["groups_opened"])
                    one.tell("two replicas and two hosts serve")
                return
            # A group that was opened since then is trained, and episodes of the next batch run.
            shared = line["groups_trained"] > opened[0]
            if killed or not shared or line["episodes_running"] < SIBLINGS:
                return
            one.tell(f"SIGKILL to the first replica and host, {line['episodes_running']} episodes")
            # A container that is killed by hand is not started again: its work goes to the other.
            docker("kill", "-s", "KILL", *old)
            killed.extend(old)

        job.follow(at)
        while not killed:  # a fast machine is through before a second engine has loaded
            if groups >= _GROUPS_MAX:
                raise Failed(f"no moment for the kill in {groups} groups")
            opened[:] = [0] if opened else []
            one.submit(2 * GROUPS).follow(at)
            groups += 2 * GROUPS
        if one.started("router") != router:
            raise Failed("the router was replaced, or started again")
        totals = audited(one)
        trained(totals, groups)
        turns = recorded(one)
        for kind in ("replicas", "hosts"):
            if len(turns[kind]) < 2:
                raise Failed(f"trained turns came from one of the {kind} only: {turns[kind]}")
        return {"killed": killed, "totals": totals["totals"], **turns}


def rolling(keep: bool) -> dict[str, Any]:
    """Each service is restarted once under load, when all serve again after the one before."""
    with project("muster-rolling", keep, COMPOSE_PROFILES="cpu", SETTINGS=_small()) as one:
        one.up()
        took: dict[str, float] = {}
        waiting = [*SERVICES]
        turns: list[int] = []  # of the job when all served

        def at(line: Line) -> None:
            if not waiting:
                return
            if not turns:
                if one.healthy() == len(SERVICES):
                    turns.append(line["turns"])
                return
            if not loaded(waiting[0], line, turns[0]):
                return
            turns.clear()
            service = waiting.pop(0)
            load = (
                "with a batch" if service == "trainer" else f"{line['episodes_running']} episodes"
            )
            one.tell(f"restart {service}, {load} under way")
            took[service] = one.restart(service)
            one.tell(f"restarted in {took[service]:.0f} s")

        groups = 0
        while waiting:
            if groups >= _GROUPS_MAX:
                raise Failed(f"no moment under load in {groups} groups to restart: {waiting}")
            one.submit(2 * GROUPS).follow(at)
            turns.clear()
            groups += 2 * GROUPS
        totals = audited(one)
        trained(totals, groups)
        return {"seconds": one.seconds | took, "totals": totals["totals"], **recorded(one)}


def loaded(service: str, line: Line, turns: int) -> bool:
    """Whether a restart is felt: episodes run and have made turns since all served (`turns`), or
    the trainer has a whole batch in its hands; while it has, no episode need run."""
    if service == "trainer":
        fates = line["groups_trained"] + line["groups_filtered"]
        return bool(line["groups_complete"] - fates >= GROUPS)
    return bool(line["episodes_running"] > 0 and line["turns"] >= turns + SIBLINGS)


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


def _ready() -> None:
    """Raises Skipped."""
    compose_command()
    try:
        docker("version", "--format", "{{.Server.Version}}")
    except Failed as error:
        raise Skipped(f"no Docker Engine answers: {error}") from error


def tried(name: str, keep: bool) -> dict[str, Any]:
    """A story, told; what it found, or {"failed": why}."""
    say(f"== {name}: {STORIES[name].__doc__}")
    begin = time.monotonic()
    try:
        found, told = STORIES[name](keep), "ok"
    except (Failed, subprocess.TimeoutExpired) as error:
        found, told = {"failed": str(error)}, f"FAILED: {error}"
    else:
        for what, value in found.items():
            say(f"          {what}: {json.dumps(value)}")
    say(f"== {name}: {told} ({time.monotonic() - begin:.0f} s)\n")
    return found


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
        if options.build:
            build()
    except Skipped as reason:
        say(f"skipped: {reason}")
        return 0
    except (Failed, subprocess.TimeoutExpired) as error:
        say(f"no images: {error}")
        return 1
    found = {name: tried(name, options.keep) for name in options.only or STORIES}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 1 if any("failed" in one for one in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
