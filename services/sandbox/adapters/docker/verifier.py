"""A verifier's run in a container of its own.

Promise: the container is made from what the agent's box started from; the agent's files come in
as transfer.py says, before any test is there; the verdict is read once the container has stopped,
without following a link; a link of the agent's to the tests, the verdict or /proc is not there.
Does not cover: what the files mean (verdict.py).
"""

from __future__ import annotations

import asyncio
import io
import posixpath
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import IO

from services.sandbox.adapters.docker import shell, steps, transfer
from services.sandbox.adapters.docker.engine import Engine, EngineTrouble
from services.sandbox.adapters.docker.shell import Session
from services.sandbox.adapters.docker.steps import Place
from services.sandbox.adapters.docker.transfer import Carried, Links, Plan
from services.sandbox.adapters.native.verdictfile import VERDICT_BYTES_MAX, VERDICT_FILES
from services.sandbox.box import BoxFailure, Evidence, Judgement, JudgeSpec, PutFile

VERDICT_FOLDER = "/logs/verifier"
_PREPARE_S = 60.0
_CARRY_S = 300.0
_READ_TIMES = 16  # of what the box may hold: many small files are read with the folders around them
_LOOKS_MAX = 2000  # at paths of the trusted state that the agent's links lead by
_ARGUMENTS = 500  # paths in one call
_HEADERS = 4096  # bytes of a tar beside a small file's own


async def carry(agent: Place, below: Carried, verifier: Place, scratch: Path) -> None:
    """Bring the files of a sealed agent over.

    below: what agents left in the snapshots that its box was started from. scratch: a folder for
    temporary files.
    """
    carried = transfer.merged(below, await agent.engine.changes(agent.container))
    plan = transfer.plan(carried)
    await clear(verifier, plan.gone)
    try:
        async with asyncio.timeout(_CARRY_S):
            with tempfile.TemporaryFile(dir=scratch) as packed:
                found = await _Reader(agent, scratch).pack(plan, packed)
                packed.seek(0)
                await verifier.engine.put(verifier.container, "/", packed)
            there = frozenset(change.path for change in carried.there)
            await _remove(verifier, await _snares(verifier, Links(found, there)))
    except TimeoutError as late:
        raise BoxFailure(f"the files of the box took over {_CARRY_S:g} s to carry") from late


class _Reader:
    """Reads an agent's files, so many bytes in all; what is slow about it in threads."""

    def __init__(self, agent: Place, scratch: Path):
        self._agent, self._scratch = agent, scratch
        self._left = _READ_TIMES * (2 * agent.limits.disk_bytes + (64 << 20))

    async def pack(self, plan: Plan, packed: IO[bytes]) -> dict[str, str]:
        """The files of a plan as one tar; path → target of the links among them."""
        found: dict[str, str] = {}
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as target:
            for path in plan.folders:
                found |= await self._add(path, target, frozenset({path}))
            for path in plan.trees:
                found |= await self._add(path, target, frozenset())
            for path in plan.sifted:
                found |= await self._add(path, target, plan.wanted)
        return found

    async def _add(
        self, path: str, target: tarfile.TarFile, wanted: frozenset[str]
    ) -> dict[str, str]:
        agent = self._agent
        with tempfile.TemporaryFile(dir=self._scratch) as part:
            if not await agent.engine.archive(agent.container, path, self._left, part):
                raise BoxFailure("the files of the box are more than can be read for a verdict")
            self._left -= part.tell()
            part.seek(0)
            try:
                return await asyncio.to_thread(transfer.copy, part, path, target, wanted)
            except (tarfile.TarError, EOFError) as error:
                raise EngineTrouble(
                    f"the engine's tar of {path} cannot be read: {error}"
                ) from error


async def _snares(verifier: Place, links: Links) -> list[str]:
    """Links of the agent's that lead to what is the verifier's own."""
    found, looks = [], _LOOKS_MAX
    for path in sorted(links.own):
        while True:
            try:
                snare = links.is_snare(path)
            except transfer.Untold as untold:
                if not looks:  # no honest answer has as many links into its own base
                    snare = True
                else:
                    looks -= 1
                    lies = await verifier.engine.stat(verifier.container, untold.path)
                    link = lies.link if lies and lies.kind == "link" else None
                    links.tell(untold.path, link, absent=lies is None)
                    continue
            break
        if snare:
            found.append(path)
    return found


async def clear(verifier: Place, gone: tuple[str, ...] = ()) -> None:
    """What the agent removed; and no verdict or test of the image's own is there."""
    own = (VERDICT_FOLDER, "/tests")
    there = [p for p in own if await verifier.engine.stat(verifier.container, p) is not None]
    await _remove(verifier, [*there, *gone])


async def _remove(verifier: Place, paths: list[str]) -> None:
    for start in range(0, len(paths), _ARGUMENTS):
        call = ["-c", 'rm -rf -- "$@"', "clear", *paths[start : start + _ARGUMENTS]]
        await _prepare(verifier, call)


async def _prepare(verifier: Place, call: list[str]) -> None:
    """A command of ours in a container in which nothing of the agent's has run."""
    whole = [shell.BASH, "--noprofile", "--norc", *call]
    place = replace(verifier, user="0")
    try:
        evidence, _ = await steps.run(place, lambda _: whole, Session(), _PREPARE_S)
    except steps.NotBegun as problem:
        raise BoxFailure(f"the verifier could not be prepared: {problem}") from problem
    if evidence.exit_code or evidence.timed_out:
        raise BoxFailure(f"the verifier could not be prepared: {evidence.tail[-200:]!r}")


async def judge(verifier: Place, spec: JudgeSpec) -> Judgement:
    """Put the tests in, run them, end the container's processes, read the verdict."""
    engine = verifier.engine
    await engine.put(verifier.container, "/", tar_of(spec.files, (VERDICT_FOLDER,), 0o777))
    verifier.disk_at_start = await steps.disk(verifier)
    session = Session(spec.cwd, spec.env)
    try:
        evidence, _ = await steps.run(
            verifier, lambda token: shell.script(spec.script, token, session), session,
            spec.timeout_s,
        )  # fmt: skip
    except steps.Unkillable:
        evidence = Evidence(exit_code=137, signal=9, timed_out=True, wall_s=spec.timeout_s)
    except steps.NotBegun as failure:
        raise BoxFailure(f"the verifier's shell did not start: {failure}") from failure
    await engine.stop(verifier.container)
    files, problems = {}, {}
    for name in VERDICT_FILES:
        data, problem = await _verdict(engine, verifier.container, f"{VERDICT_FOLDER}/{name}")
        if problem:
            problems[name] = problem
        else:
            files[name] = data
    return Judgement(evidence, files, problems)


async def _verdict(engine: Engine, container: str, path: str) -> tuple[bytes, str]:
    found = await engine.stat(container, path)
    if found is None:
        return b"", "absent"
    if found.kind != "file":
        return b"", "not a plain file"
    if found.size > VERDICT_BYTES_MAX:
        return b"", f"over {VERDICT_BYTES_MAX} bytes"
    sink = io.BytesIO()
    await engine.archive(container, path, VERDICT_BYTES_MAX + 8 * _HEADERS, sink)
    sink.seek(0)
    try:
        with tarfile.open(fileobj=sink) as archive:
            member = archive.next()
            content = archive.extractfile(member) if member and member.isreg() else None
            return (content.read(), "") if content else (b"", "not a plain file")
    except (tarfile.TarError, EOFError) as error:
        return b"", f"not readable ({error})"


def tar_of(files: tuple[PutFile, ...], folders: tuple[str, ...] = (), mode: int = 0o755) -> bytes:
    """A tar of files of our own, with the folders, of that mode, that have to be there."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for folder in folders:
            info = tarfile.TarInfo(folder.lstrip("/"))
            info.type, info.mode = tarfile.DIRTYPE, mode
            archive.addfile(info)
        for file in files:
            info = tarfile.TarInfo(posixpath.normpath(file.path).lstrip("/"))
            info.size, info.mode = len(file.data), file.mode
            archive.addfile(info, io.BytesIO(file.data))
    return sink.getvalue()
