"""Native boxes behind the contract of `services.sandbox.box.Backend`.

Owns: the keeper process and one channel to each box. Promise: a step whose PID 1 does not answer
in time ends the whole box (evidence `broken`); a failed start leaves nothing; closing ends all.
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

from muster.errors import HostUnfit
from muster.types import Limits
from services.sandbox.adapters.native.client import Channel, KeeperProcess
from services.sandbox.adapters.native.spawn import DEFENCES
from services.sandbox.box import BoxFailure, Evidence, Judgement, JudgeSpec, PutFile

_START_WAIT_S = 20.0
_GRACE_S = 12.0  # PID 1 gets this long beyond a step's limit before the box counts as broken
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
            await self._keeper.call(request, fd=theirs.fileno())
            theirs.close()
            first = await channel.receive(_START_WAIT_S)
            if "error" in first:
                raise BoxFailure(str(first["error"])[:2000])
        except BaseException:
            theirs.close()
            await self.end(box)
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
        output_bytes = self._limits[box].output_bytes
        request = {"op": "run", "timeout_s": timeout_s, "output_bytes": output_bytes} | what
        try:
            answer, blob = await self._channel(box).call(request, wait_s=timeout_s + _GRACE_S)
            return _evidence(answer, blob, output_bytes)
        except BoxFailure as error:
            return Evidence(exit_code=137, broken=str(error))

    async def seal(self, box: str) -> None:
        await self._keeper.call({"op": "seal", "box": box})
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
            answer, blob = await self._keeper.call({"op": "verdict", "box": name})
            return _judgement(evidence, answer["files"], blob)
        finally:
            await self.end(name)

    async def end(self, box: str) -> bool:
        # The keeper first: a call in flight then sees the end of its socket, not a closed one.
        answer, _ = await self._keeper.call({"op": "end", "box": box})
        channel = self._channels.pop(box, None)
        self._limits.pop(box, None)
        if channel:
            channel.close()
        return bool(answer["existed"])

    async def close(self) -> None:
        """The keeper ends, and every box with it."""
        await self._keeper.stop()
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()


def _evidence(answer: dict[str, Any], blob: bytes, output_bytes: int) -> Evidence:
    """Check an answer of PID 1: types and bounds, then believe the figures."""
    if "error" in answer or "broken" in answer:
        return Evidence(exit_code=137, broken=str(answer.get("broken", answer.get("error")))[:500])
    try:
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
    runtime_dir: Path, *, defences: frozenset[str] = DEFENCES
) -> AsyncIterator[NativeBackend]:
    """A backend whose boxes all end with the block. Raises HostUnfit saying what to do.

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
    keeper = KeeperProcess(runtime_dir, instance_of(runtime_dir))
    await keeper.ready()
    backend = NativeBackend(keeper, defences)
    try:
        yield backend
    finally:
        await backend.close()
