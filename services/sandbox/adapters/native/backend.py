"""Native boxes behind the contract of `services.sandbox.box.Backend`.

Owns: the keeper process and one channel to each box. Promise: a box is told as broken only when
its PID 1 says that its agent broke it; a PID 1 that is late or gone is BoxFailure; a failed start
leaves nothing; closing ends all; a keeper that dies ends the backend's block with Unavailable.
Does not cover: how a box is built (keeper.py), how a step runs (boxinit.py).
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from muster import telemetry
from muster.errors import HostUnfit
from muster.types import Limits
from services.sandbox.adapters.native.channel import Channel
from services.sandbox.adapters.native.client import KeeperProcess, Patience
from services.sandbox.adapters.native.pressure import UNTOLD
from services.sandbox.adapters.native.spawn import DEFENCES
from services.sandbox.box import BoxFailure, Evidence, Judgement, JudgeSpec, PutFile

_log = telemetry.logger("muster.sandbox")
_START_WAIT_S = 20.0
_GRACE_S = 12.0  # PID 1 gets this long beyond a step's limit before the box counts as lost
_PUT_BYTES = 4 << 20


class NativeBackend:
    """Boxes from namespaces, overlayfs and cgroups of this kernel."""

    def __init__(self, keeper: KeeperProcess, defences: frozenset[str] = DEFENCES):
        self._keeper, self._defences = keeper, defences
        self._channels: dict[str, Channel] = {}
        self._limits: dict[str, Limits] = {}
        self._verifiers = 0

    @property
    def keeper_pid(self) -> int:
        return self._keeper.pid

    @property
    def tells_stall(self) -> bool:
        return self._keeper.tells_stall

    async def start(self, box: str, limits: Limits) -> None:
        await self._launch({"op": "start"}, box, limits)

    async def _launch(self, request: dict[str, Any], box: str, limits: Limits) -> None:
        if box in self._channels:
            raise BoxFailure(f"box {box} exists")
        own, theirs = socket.socketpair()
        request |= {
            "box": box,
            "memory_bytes": limits.memory_bytes,
            "pids": limits.pids,
            "disk_bytes": limits.disk_bytes,
            "disk_inodes": limits.disk_inodes,
            "defences": sorted(self._defences),
        }
        channel = self._channels[box] = Channel(own)
        self._limits[box] = limits
        try:
            await self._keeper.ask(request, fd=theirs.fileno())
            theirs.close()
            first = await channel.receive(_START_WAIT_S)
            if "error" in first:
                raise BoxFailure(str(first["error"])[:2000])
        except BaseException:
            theirs.close()
            await self._discard(box)
            raise

    async def put(self, box: str, files: tuple[PutFile, ...]) -> None:
        batch: list[PutFile] = []
        for file in files:
            if batch and sum(len(f.data) for f in [*batch, file]) > _PUT_BYTES:
                await self._put(box, batch)
                batch = []
            batch.append(file)
        if batch:
            await self._put(box, batch)

    async def _put(self, box: str, files: list[PutFile]) -> None:
        listed = [[f.path, f.mode, len(f.data)] for f in files]
        await self._ask(box, {"op": "put", "files": listed}, b"".join(f.data for f in files))

    async def set_session(self, box: str, cwd: str, env: dict[str, str]) -> None:
        await self._ask(box, {"op": "session", "cwd": cwd, "env": env, "make_cwd": True})

    async def _ask(self, box: str, request: dict[str, Any], blob: bytes = b"") -> None:
        answer, _ = await self._channel(box).call(request, blob, wait_s=_START_WAIT_S)
        if "error" in answer:
            raise BoxFailure(str(answer["error"])[:2000])

    def _channel(self, box: str) -> Channel:
        if box not in self._channels:
            raise BoxFailure(f"there is no box {box}")
        return self._channels[box]

    async def run(self, box: str, command: str, timeout_s: float) -> Evidence:
        return await self._run(box, {"command": command}, timeout_s)

    async def _run(self, box: str, what: dict[str, Any], timeout_s: float) -> Evidence:
        channel, output_bytes = self._channel(box), self._limits[box].output_bytes
        request = {"op": "run", "timeout_s": timeout_s, "output_bytes": output_bytes} | what
        answer, blob = await channel.call(request, wait_s=timeout_s + _GRACE_S)
        return _evidence(answer, blob, output_bytes)

    async def seal(self, box: str) -> None:
        await self._keeper.ask_until_done({"op": "seal", "box": box})
        self._channel(box).close()

    async def judge(self, box: str, spec: JudgeSpec) -> Judgement:
        self._verifiers += 1
        name = f"{box}.v{self._verifiers}"
        await self._launch({"op": "judge", "of": box}, name, spec.limits)
        try:
            await self.put(name, spec.files)
            session = {"op": "session", "cwd": spec.cwd, "env": spec.env, "make_cwd": False}
            await self._ask(name, session)
            evidence = await self._run(name, {"script": spec.script}, spec.timeout_s)
            answer, blob = await self._keeper.ask_until_done({"op": "verdict", "box": name})
            return _judgement(evidence, answer["files"], blob)
        finally:
            await self._discard(name)

    async def _discard(self, box: str) -> None:
        """End a box on the way out of something else, which is what the caller hears of."""
        try:
            await self.end(box)
        except BoxFailure as failure:
            _log.error("box %s could not be ended: %s", box, failure)

    async def end(self, box: str) -> bool:
        try:
            answer, _ = await self._keeper.ask_until_done({"op": "end", "box": box})
            return bool(answer["existed"])
        finally:
            # Only now: a call in flight sees the end of its socket, not a closed one.
            channel = self._channels.pop(box, None)
            self._limits.pop(box, None)
            if channel:
                channel.close()

    def close(self) -> None:
        """Let go of the boxes, which have ended with the keeper."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()


def _evidence(answer: dict[str, Any], blob: bytes, output_bytes: int) -> Evidence:
    """Check an answer of PID 1: types and bounds, then believe the figures."""
    if "error" in answer:
        raise BoxFailure(str(answer["error"])[:2000])
    try:
        if "broken" in answer:
            return Evidence(
                exit_code=137,
                broken=str(answer["broken"])[:500],
                oom_kills=max(0, int(answer["oom_kills"])),
                pids_refused=max(0, int(answer["pids_refused"])),
            )
        head = max(0, min(int(answer["head"]), len(blob)))
        return Evidence(
            exit_code=int(answer["exit_code"]) & 0xFF,
            signal=int(answer["signal"]) & 0x7F,
            timed_out=bool(answer["timed_out"]),
            oom_kills=max(0, int(answer["oom_kills"])),
            pids_refused=max(0, int(answer["pids_refused"])),
            disk_full=bool(answer["disk_full"]),
            wall_s=max(0.0, float(answer["wall_s"])),
            cpu_s=max(0.0, float(answer["cpu_s"])),
            cpu_stall_s=max(UNTOLD, float(answer["cpu_stall_s"])),
            memory_stall_s=max(UNTOLD, float(answer["memory_stall_s"])),
            io_stall_s=max(UNTOLD, float(answer["io_stall_s"])),
            head=blob[:head][:output_bytes],
            tail=blob[head:][:output_bytes],
            total=max(0, int(answer["total"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BoxFailure(f"PID 1 of the box answered nonsense: {error}") from error


def _judgement(evidence: Evidence, found: dict[str, Any], blob: bytes) -> Judgement:
    files, problems, at = {}, {}, 0
    for name, facts in found.items():
        if facts["problem"]:
            problems[name] = str(facts["problem"])
        else:
            files[name] = blob[at : at + facts["size"]]
        at += facts["size"]
    return Judgement(evidence, files, problems)


def instance_of(runtime_dir: Path) -> str:
    """Names an instance in its cgroups (`muster-<instance>`): the same folder, the same name."""
    return hashlib.sha256(str(runtime_dir).encode()).hexdigest()[:12]


@asynccontextmanager
async def open_native(
    runtime_dir: Path,
    *,
    defences: frozenset[str] = DEFENCES,
    patience: Patience | None = None,
) -> AsyncIterator[NativeBackend]:
    """A backend whose boxes all end with the block. Raises HostUnfit saying what to do.

    When the keeper dies within the block, the block is cancelled and ends with Unavailable.
    `defences` is for the tests that show what each one stops; no configuration reaches it.
    """
    if os.geteuid() != 0:
        raise HostUnfit(
            "native boxes need root (namespaces, mounts, cgroups)",
            field="user",
            value=os.geteuid(),
            way_out="run the sandbox service as root, or in a container with --cap-add SYS_ADMIN "
            "-v /sys/fs/cgroup:/sys/fs/cgroup:rw",
        )
    if set(str(runtime_dir)) & set(":,\\"):
        raise HostUnfit(
            "overlayfs cannot use a path with ':', ',' or '\\'",
            field="sandbox.runtime_dir",
            value=runtime_dir,
            way_out="choose another folder",
        )
    keeper = KeeperProcess(runtime_dir, instance_of(runtime_dir), patience or Patience())
    await keeper.ready()
    backend = NativeBackend(keeper, defences)
    try:
        async with keeper.serving():
            yield backend
    finally:
        backend.close()
