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
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from muster import telemetry
from muster.archive import TaskFile
from muster.errors import HostUnfit, InvalidInput
from muster.types import Limits
from services.sandbox.adapters.native import copies, survivors
from services.sandbox.adapters.native.answers import evidence, textual
from services.sandbox.adapters.native.channel import Channel
from services.sandbox.adapters.native.client import KeeperProcess, Patience
from services.sandbox.adapters.native.snapshots import EXISTS
from services.sandbox.adapters.native.spawn import DEFENCES
from services.sandbox.adapters.native.steps import Session
from services.sandbox.box import (
    HOST,
    BoxFailure,
    CopiedFile,
    Evidence,
    Judgement,
    JudgeSpec,
    PutFile,
    Snapshot,
    Source,
    Survivor,
)

_log = telemetry.logger("muster.sandbox")
_START_WAIT_S = 20.0
_ALIVE_WAIT_S = 5.0
_GRACE_S = 12.0  # PID 1 gets this long beyond a step's limit before the box counts as lost
_PUT_BYTES = 4 << 20
_NO_BASES: Mapping[str, str] = MappingProxyType({})
ANSWERS_KEPT, ORPHAN_S = 16, 30.0  # as the configuration has them without more


class NativeBackend:
    """Boxes from namespaces, overlayfs and cgroups of this kernel."""

    def __init__(
        self,
        keeper: KeeperProcess,
        defences: frozenset[str] = DEFENCES,
        answers_kept: int = ANSWERS_KEPT,
        bases: Mapping[str, str] = _NO_BASES,
    ):
        self._keeper, self._defences, self._answers_kept = keeper, defences, answers_kept
        self._bases = bases
        self._turns: dict[str, int] = {}  # the newest that began, by box
        self._left_s: dict[str, float] = {}  # of the limit of a survivor's running step
        self._channels: dict[str, Channel] = {}
        self._limits: dict[str, Limits] = {}
        self._prepared: set[str] = set()  # boxes whose folders were made before: by a set-up
        self._verifiers = 0

    @property
    def keeper_pid(self) -> int:
        return self._keeper.pid

    @property
    def tells_stall(self) -> bool:
        return self._keeper.tells_stall

    @property
    def limits_cpu(self) -> bool:
        """Whether a box may have a processor limit on this host."""
        return self._keeper.limits_cpu

    @property
    def builds(self) -> bool:
        return False

    async def build(self, content: str, context: dict[str, TaskFile], timeout_s: float) -> Source:
        raise BoxFailure("native boxes build no Dockerfile: the service runs its lines in a box")

    async def start(self, box: str, limits: Limits, source: Source = HOST) -> None:
        folder = self._bases.get(source.base, "")
        if not folder and source.base != HOST.base:
            raise BoxFailure(f"there is no base {source.base}")
        request = {"op": "start", "base": source.base, "folder": folder, "layer": source.layer}
        await self._launch(request, box, limits)
        if source.layer:
            self._prepared.add(box)

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
            "cpus": limits.cpus,
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

    async def alive(self, box: str) -> bool:
        try:
            await self._ask(box, {"op": "alive"}, wait_s=_ALIVE_WAIT_S)
        except BoxFailure:
            return False
        return True

    async def snapshot(self, box: str, layer: str, *, keep: bool) -> Snapshot:
        _, session = await self._ask(box, {"op": "session?"})
        cwd, env = textual(session)
        facts = await self._make_layer(
            layer, {"op": "snapshot", "box": box, "layer": layer, "keep": keep}
        )
        if not keep:
            await self.end(box)
        size, depth = int(facts["size"]), int(facts["depth"])
        return Snapshot(size, depth, cwd, env)

    async def squash(self, layer: str, into: str) -> Snapshot:
        facts = await self._make_layer(
            into, {"op": "squash", "box": "", "layer": layer, "into": into}
        )
        return Snapshot(int(facts["size"]), int(facts["depth"]))

    async def _make_layer(self, layer: str, request: dict[str, Any]) -> dict[str, Any]:
        """What the keeper says of a new snapshot; on failure, or without a caller, none is left."""
        try:
            facts, _ = await self._keeper.ask_until_done(request)
        except BaseException as error:
            if EXISTS not in str(error):  # another one, which is nothing of ours
                await self._discard_layer(layer)
            raise
        return facts

    async def _discard_layer(self, layer: str) -> None:
        try:
            await self.drop(layer)
        except BoxFailure as failure:
            _log.error("snapshot %s could not be removed: %s", layer, failure)

    async def drop(self, layer: str) -> bool:
        answer, _ = await self._keeper.ask({"op": "drop", "box": "", "layer": layer})
        return bool(answer["existed"])

    async def copy_in(self, box: str, folder: str, files: tuple[CopiedFile, ...]) -> None:
        await copies.copy_in(self._channel(box), folder, files)

    async def copy_out(self, box: str, path: str, bytes_max: int) -> tuple[CopiedFile, ...]:
        return await copies.copy_out(self._channel(box), path, bytes_max)

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
        """In a box over a snapshot `cwd` is not made: its steps begin in `/` if it is gone, as
        those of the box that it was made of do."""
        await self._enter(box, cwd, env, make_cwd=box not in self._prepared)

    async def _enter(self, box: str, cwd: str, env: dict[str, str], *, make_cwd: bool) -> None:
        blob = Session(cwd, env).packed()
        await self._ask(box, {"op": "session", "make_cwd": make_cwd}, blob)

    async def _ask(
        self, box: str, request: dict[str, Any], blob: bytes = b"", wait_s: float = _START_WAIT_S
    ) -> tuple[dict[str, Any], bytes]:
        answer, blob = await self._channel(box).call(request, blob, wait_s=wait_s)
        if "refused" in answer:
            path, why = str(answer.get("path", ""))[:500], str(answer["refused"])[:500]
            raise InvalidInput(
                f"the set-up cannot be done in its box: {path or 'what it writes'} {why}",
                field="environment/Dockerfile",
                value=path,
                way_out="mend the COPY or WORKDIR line that leads there, or the RUN before it",
            )
        if "error" in answer:
            raise BoxFailure(str(answer["error"])[:2000])
        return answer, blob

    def _channel(self, box: str) -> Channel:
        if box not in self._channels:
            raise BoxFailure(f"there is no box {box}")
        return self._channels[box]

    async def run(self, box: str, command: str, timeout_s: float, turn: int = -1) -> Evidence:
        what = {"command": command, "turn": turn, "keep": self._answers_kept}
        self._turns[box] = max(turn, self._turns.get(box, -1))
        return await self._run(box, what, timeout_s)

    async def note(self, box: str, data: bytes, shared: bytes = b"") -> None:
        if box not in self._limits:
            raise BoxFailure(f"there is no box {box}")
        await survivors.note(self._keeper, box, self._limits[box], data, shared)

    async def survivors(self) -> tuple[Survivor, ...]:
        found = await survivors.adopt(self._keeper)
        for each in found:
            name = each.survivor.box
            self._channels[name], self._limits[name] = each.channel, each.survivor.limits
            self._turns[name], self._left_s[name] = each.survivor.newest_turn, each.left_s
        return tuple(each.survivor for each in found)

    async def claim(self, layers: tuple[str, ...]) -> None:
        await self._keeper.ask({"op": "claim", "box": "", "layers": list(layers)})

    async def stopping(self) -> None:
        await self._keeper.ask({"op": "stopping", "box": ""})

    async def rejoin(self, box: str) -> Evidence:
        if box not in self._limits:
            raise BoxFailure(f"there is no box {box}")
        output_bytes = self._limits[box].output_bytes  # before the wait: the box may end meanwhile
        request = {"op": "rejoin", "turn": self._turns[box]}
        wait_s = self._left_s.get(box, 0.0) + _GRACE_S
        answer, blob = await self._channel(box).call(request, wait_s=wait_s)
        return evidence(answer, blob, output_bytes)

    async def _run(self, box: str, what: dict[str, Any], timeout_s: float) -> Evidence:
        channel, output_bytes = self._channel(box), self._limits[box].output_bytes
        request = {"op": "run", "timeout_s": timeout_s, "output_bytes": output_bytes} | what
        answer, blob = await channel.call(request, wait_s=timeout_s + _GRACE_S)
        return evidence(answer, blob, output_bytes)

    async def seal(self, box: str) -> None:
        newest = self._turns.get(box, -1)
        await self._keeper.ask_until_done({"op": "seal", "box": box, "newest": newest})
        self._channel(box).close()

    async def judge(self, box: str, spec: JudgeSpec) -> Judgement:
        self._verifiers += 1
        name = f"{box}.v{self._verifiers}"
        await self._launch({"op": "judge", "of": box, "live": spec.live}, name, spec.limits)
        try:
            await self._ask(name, {"op": "cut_links"})
            await self.put(name, spec.files)
            await self._enter(name, spec.cwd, spec.env, make_cwd=False)
            found = await self._run(name, {"script": spec.script}, spec.timeout_s)
            answer, blob = await self._keeper.ask_until_done({"op": "verdict", "box": name})
            return _judgement(found, answer["files"], blob)
        except InvalidInput as refused:  # no set-up's: the verifier's own files
            raise BoxFailure(str(refused)) from refused
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
            self._prepared.discard(box)
            self._turns.pop(box, None)
            self._left_s.pop(box, None)
            if channel:
                channel.close()

    def close(self) -> None:
        """Let go of the boxes, which have ended with the keeper."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()


def _judgement(run: Evidence, found: dict[str, Any], blob: bytes) -> Judgement:
    files, problems, at = {}, {}, 0
    for name, facts in found.items():
        if facts["problem"]:
            problems[name] = str(facts["problem"])
        else:
            files[name] = blob[at : at + facts["size"]]
        at += facts["size"]
    return Judgement(run, files, problems)


def instance_of(runtime_dir: Path) -> str:
    """Names an instance in its cgroups (`muster-<instance>`): the same folder, the same name."""
    return hashlib.sha256(str(runtime_dir).encode()).hexdigest()[:12]


@asynccontextmanager
async def open_native(
    runtime_dir: Path,
    *,
    defences: frozenset[str] = DEFENCES,
    patience: Patience | None = None,
    orphan_s: float = ORPHAN_S,
    answers_kept: int = ANSWERS_KEPT,
    bases: Mapping[str, str] = _NO_BASES,
) -> AsyncIterator[NativeBackend]:
    """A backend whose boxes all end with the block. Raises HostUnfit saying what to do.

    Boxes with a note outlive a process that is killed within the block, for `orphan_s`: the next
    one in the same folder has them as `survivors`.

    When the keeper dies within the block, the block is cancelled and ends with Unavailable.
    bases: name of a base beside `host` → its folder on this host (basestore.py).
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
    keeper = KeeperProcess(runtime_dir, instance_of(runtime_dir), patience or Patience(), orphan_s)
    await keeper.ready()
    backend = NativeBackend(keeper, defences, answers_kept, bases)
    try:
        async with keeper.serving():
            yield backend
    finally:
        backend.close()
