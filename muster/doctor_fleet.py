"""Are all services of a run there, reachable, serving, of one version, and with one time?

Pure: what is announced and how each answered in, checks out. Owns: the rules. Does not cover:
asking them (doctor_look.py).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence

from muster.config import Config
from muster.doctor import Check, note, ok, problem
from muster.doctor_redis import clock
from muster.registry import KINDS, Entry
from muster.types import Value

ROLES = tuple(kind for kind in KINDS if kind != "standby")
_START = {
    "router": "python -m services.router",
    "inference": "python -m services.inference",
    "sandbox": "python -m services.sandbox (as root)",
    "readybank": "python -m services.readybank",
    "trainer": "python -m services.trainer",
}


class Seen(Value, frozen=True):
    """One announced service; `problem` is "" when it says SERVING, else why not."""

    entry: Entry
    problem: str = ""


def fleet_checks(seen: Sequence[Seen], config: Config, here: str, version: str) -> Iterator[Check]:
    """here: this machine's host name; version: of Muster here, "" when it is not known."""
    for role in ROLES:
        of_role = [one for one in seen if one.entry.kind == role]
        if not of_role and role == "trainer":
            # One of one's own announces nothing: starting another would take its seat.
            yield note(
                "fleet.trainer",
                f"no trainer is announced in run {config.run}",
                "well if a trainer of your own has the seat (docs/integrate.md); if none has, "
                f"start it with the same run and redis.url ({_START[role]}), or see its log",
            )
        elif not of_role:
            yield problem(
                f"fleet.{role}",
                f"no {role} is announced in run {config.run}",
                f"start it with the same run and redis.url ({_START[role]}), or see its log",
            )
        for one in of_role:
            yield _answers(one, here)
    yield from _versions(seen, version)
    for one in seen:
        entry = one.entry
        if entry.clock_unix_s:
            ahead = entry.clock_unix_s - entry.beat_unix_s
            name = f"clock.{entry.host or entry.id}"
            yield clock(name, f"the clock of {entry.id}, against the server's,", ahead)
    yield from _transport(seen, config)


def is_loopback(address: str) -> bool:
    """True for an address that only its own machine can reach."""
    host = address.rpartition(":")[0].strip("[]")
    if address.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _answers(one: Seen, here: str) -> Check:
    entry = one.entry
    name = f"fleet.{entry.kind}"
    if entry.host != here and is_loopback(entry.address):
        return problem(
            name,
            f"{entry.id} on {entry.host} announces {entry.address}, which only that machine "
            "can reach",
            f'set {entry.kind}.listen = "0.0.0.0:PORT" there; advertise_host says under which '
            "name it is reached",
        )
    if not one.problem:
        return ok(name, f"{entry.id} at {entry.address} serves")
    if "NOT_SERVING" in one.problem:
        return problem(
            name,
            f"{entry.id} at {entry.address} does not serve",
            "it is starting, or fenced: see its log; `muster explain` says what waits for it",
        )
    return problem(
        name,
        f"{entry.id} at {entry.address} does not answer ({one.problem})",
        f"let that port through (firewall, published ports), set advertise_host on {entry.host} "
        "to what others reach, or start it again",
    )


def _versions(seen: Sequence[Seen], version: str) -> Iterator[Check]:
    others = [one.entry for one in seen if version and one.entry.version not in ("", version)]
    for entry in others:
        yield problem(
            "fleet.versions",
            f"{entry.id} on {entry.host} runs Muster {entry.version}, here is {version}",
            "install one version everywhere (the same image tag), then restart what changed",
        )
    if seen and not others:
        yield ok("fleet.versions", f"all of {version or 'one version'}")


def _transport(seen: Sequence[Seen], config: Config) -> Iterator[Check]:
    trainers = {one.entry.host for one in seen if one.entry.kind == "trainer"}
    replicas = {one.entry.host for one in seen if one.entry.kind == "inference"}
    mine = config.sections.get("trainer")
    told = str(getattr(mine, "transport_host", ""))
    if told and is_loopback(f"{told}:0") and trainers and replicas - trainers:
        yield problem(
            "trainer.transport_host",
            f"{told}: replicas on other machines ({', '.join(sorted(replicas - trainers))}) "
            "cannot fetch weights there",
            "take it out, or set it to an address of the trainer's machine that they reach",
        )
    boxes = {one.entry.info.get("backend", "") for one in seen if one.entry.kind == "sandbox"}
    if "fake" in boxes:
        yield note(
            "fleet.boxes",
            "a sandbox host makes no boxes (backend fake): its rewards are made up",
            'set sandbox.backend = "native" or "docker"',
        )
