"""Boxes that a former service left: taken over from the keeper, and from PID 1 of each.

Owns: the name of a host, which has to be the same after a restart for its boxes to be found.
Promise: from the moment that a box is told here its former service can do nothing in it; a box
whose PID 1 is gone is ended and left out. Does not cover: who may use the boxes (pool.py), how long
they live without a service (keeper.py).
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from muster import telemetry
from muster.types import Limits
from services.sandbox.adapters.native.answers import evidence
from services.sandbox.adapters.native.channel import Channel
from services.sandbox.adapters.native.client import KeeperProcess
from services.sandbox.box import BoxFailure, KeptStep, Survivor

_log = telemetry.logger("muster.sandbox")
_TELL_WAIT_S = 20.0
_HOST_ID = "host_id"
_HOST_ID_MAX = 200


@dataclass(frozen=True)
class Adopted:
    """A survivor and the way to its PID 1 (closed for a sealed one).

    left_s: of the time limit of a step that runs.
    """

    survivor: Survivor
    channel: Channel
    left_s: float = 0.0


async def note(
    keeper: KeeperProcess, box: str, limits: Limits, data: bytes, shared: bytes = b""
) -> None:
    """Keep a note with the keeper; raises BoxFailure when it takes no more.

    What it shares with others is sent when the keeper does not have it from one of them.
    """
    facts: dict[str, Any] = msgspec.to_builtins(limits)
    digest = hashlib.sha256(shared).hexdigest() if shared else ""
    request = {"op": "note", "box": box, "limits": facts, "shared": digest, "size": len(data)}
    answer, _ = await keeper.ask(request, data)
    if answer.get("wanted"):
        await keeper.ask(request, data + shared)


async def adopt(keeper: KeeperProcess) -> list[Adopted]:
    """All boxes of a former service that have a note; the others have ended by then."""
    answer, _ = await keeper.ask_until_done({"op": "survivors", "box": ""})
    found: list[Adopted] = []
    shared: dict[bytes, bytes] = {}  # so that what is alike is held once here as well
    for name in answer["boxes"]:
        try:
            found.append(await _adopt(keeper, str(name), shared))
        except BoxFailure as failure:
            _log.warning("box %s of the former service is lost: %s", name, failure)
            await _end(keeper, str(name))
    return found


async def _adopt(keeper: KeeperProcess, box: str, known: dict[bytes, bytes]) -> Adopted:
    own, theirs = socket.socketpair()
    channel = Channel(own)
    try:
        request = {"op": "adopt", "box": box}
        facts, data = await keeper.ask_until_done(request, fd=theirs.fileno())
        limits = msgspec.convert(facts["limits"], Limits)
        size = int(facts["size"])
        data, shared = data[:size], known.setdefault(data[size:], data[size:])
        if facts["sealed"]:
            channel.close()
            newest = int(facts["newest"])
            survivor = Survivor(box, limits, data, newest_turn=newest, sealed=True, shared=shared)
            return Adopted(survivor, channel)
        if not facts["living"]:
            raise BoxFailure("its PID 1 is gone")
        theirs.close()
        survivor, left_s = await _told(channel, Survivor(box, limits, data, shared=shared))
        return Adopted(survivor, channel, left_s)
    except BaseException:
        channel.close()
        raise
    finally:
        theirs.close()


async def _told(channel: Channel, box: Survivor) -> tuple[Survivor, float]:
    """With what PID 1 says of its steps; and seconds to the limit of the one that runs."""
    first = await channel.receive(_TELL_WAIT_S)
    if "error" in first:
        raise BoxFailure(str(first["error"])[:2000])
    kept = []
    for turn in first["kept"]:
        answer, blob = await channel.call({"op": "kept", "turn": turn}, wait_s=_TELL_WAIT_S)
        if "error" in answer:
            continue  # the step that ran has ended meanwhile, and taken its place
        step = evidence(answer, blob, box.limits.output_bytes)
        kept.append(KeptStep(int(turn), str(answer["command"]), step))
    told = msgspec.structs.replace(
        box,
        kept=tuple(kept),
        running=_running(first["running"]),
        newest_turn=int(first["newest"]),
    )
    return told, max(0.0, float(first["left_s"]))


def _running(told: Any) -> tuple[int, str] | None:
    return (int(told[0]), str(told[1])) if told else None


async def _end(keeper: KeeperProcess, box: str) -> None:
    try:
        await keeper.ask_until_done({"op": "end", "box": box})
    except BoxFailure as failure:
        _log.error("box %s could not be ended: %s", box, failure)


def host_id(runtime_dir: Path) -> str:
    """The name of the host of this folder: made up once, then the same for good.

    Raises OSError when the folder cannot be written.
    """
    path = runtime_dir / _HOST_ID
    runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (known := _read(path)):
        made = runtime_dir / f".{_HOST_ID}.{secrets.token_hex(4)}"
        made.write_text(f"{socket.gethostname()}-{secrets.token_hex(4)}\n", "utf-8")
        try:
            os.link(made, path)  # whole or not at all, and the first of two is the name of both
        except FileExistsError:
            pass
        finally:
            made.unlink()
        known = _read(path)
    if not known:
        raise OSError(f"{path} holds no name: remove it")
    return known


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(_HOST_ID_MAX).strip()
    except FileNotFoundError:
        return ""
