"""A version in a folder: sharded safetensors and their manifest, for engines that share a disk.

Owns: writing, reading and collecting such folders. Promise: a folder with a version's name is whole
and durable (written under another name, synced, renamed); what is read has every digest of the
manifest; nothing is a pickle; old ones are deleted only by `collect`. Does not cover: who is told
of a folder (publisher.py).
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from muster.background import in_daemon
from muster.clock import monotonic
from muster.errors import InvalidInput, Unavailable
from muster.tensor_files import as_os_error
from muster.transfer import manifest as weights
from muster.transfer.group import ahead_s
from muster.transfer.receiving import Staging
from muster.transfer.snapshot import Snapshot
from muster.types import Value

MANIFEST = "manifest.json"
SHARD_BYTES = 1 << 30
_NAME = re.compile(r"version-(\d{6,})-[0-9a-f]{12}")
_WRITING = ".writing-"


class StoredSpec(Value, frozen=True):
    """Where a version lies, as the replica sees it, how long reading it may take (seconds), and how
    fast it may be read (0: no bound)."""

    folder: str
    timeout_s: float
    bytes_per_s: float = 0.0


def save(snapshot: Snapshot, root: Path, *, shard_bytes: int = SHARD_BYTES) -> Path:
    """The version's folder below `root`; found there already, it is read through, and written anew
    if it is not what it should be. What others left half written goes first: it may be what fills
    the disk.

    Raises Unavailable when it cannot be written; nothing of it is left then.
    """
    manifest = snapshot.manifest
    final = root / f"version-{manifest.version:06d}-{manifest.digest[:12]}"
    if final.is_dir():
        if not _wrong(final, manifest):
            return final
        # Whoever reads it now refuses it anyway, and is told to publish that version again.
        shutil.rmtree(final, ignore_errors=True)
    for rest in root.glob(f"{_WRITING}*"):
        shutil.rmtree(rest, ignore_errors=True)
    # A name of its own: a save that was given up may still be at it.
    writing = root / f"{_WRITING}{final.name}-{uuid.uuid4().hex}"
    try:
        writing.mkdir(parents=True)
        for number, names in enumerate(_shards(manifest, shard_bytes)):
            tensors = snapshot.tensors()
            _write(writing / f"{number:05d}.safetensors", {name: tensors[name] for name in names})
        (writing / MANIFEST).write_bytes(msgspec.json.encode(manifest))
        _sync(writing / MANIFEST)
        _sync(writing)
        writing.rename(final)
        _sync(root)
    except OSError as error:
        shutil.rmtree(writing, ignore_errors=True)
        if final.is_dir() and not _wrong(final, manifest):  # another one was faster
            return final
        raise Unavailable(
            f"the version cannot be stored: {error}",
            field="transfer.folder",
            value=root,
            way_out="make room there, or publish directly",
        ) from error
    return final


async def put(snapshot: Snapshot, root: Path, *, keep: int, timeout_s: float) -> Path:
    """Save a version in a thread, then collect all but it and the newest `keep`; its folder.

    Raises Unavailable as `save` does, and when the disk has not answered in time.
    """

    def work() -> Path:
        folder = save(snapshot, root)
        collect(root, keep=keep, spare=folder)
        return folder

    try:
        async with asyncio.timeout(timeout_s):
            return await in_daemon(work, "store-version")
    except TimeoutError:
        raise Unavailable(
            f"version {snapshot.manifest.version} was not stored within {timeout_s:.1f} s",
            field="transfer.folder",
            value=root,
            way_out="see whether that disk answers; the version is stored again later",
        ) from None


def load(manifest: weights.Manifest, spec: StoredSpec, root: Path, staging: Staging) -> Any:
    """The version's stream, verified, in memory of `staging`; whoever gets it gives it back.

    Raises InvalidInput for a folder outside `root`, Unavailable for one that is not that version or
    is not read in time.
    """
    folder = Path(spec.folder).resolve()
    if not folder.is_relative_to(root.resolve()):
        raise InvalidInput(
            "versions are read below one folder only",
            field="stored.folder",
            value=spec.folder,
            way_out=f"store them below inference.stored_root = {root}",
        )
    slots, total = weights.layout(manifest.tensors)
    stream, began = staging.take(total), monotonic()
    pieces = {
        s.name: stream[at.start : at.end] for s, at in zip(manifest.tensors, slots, strict=True)
    }

    def take(name: str, tensor: Any, read: int) -> Any:
        _pace(spec, read, monotonic() - began)
        pieces[name].copy_(weights.raw(tensor))
        return pieces[name].cpu()

    wrong = _wrong(folder, manifest, take)
    if wrong:
        staging.give_back(stream)
        raise Unavailable(
            f"the stored version cannot be used: {wrong}",
            field="stored.folder",
            value=folder,
            way_out="publish that version again",
        )
    return stream


def _wrong(
    folder: Path,
    manifest: weights.Manifest,
    take: Callable[[str, Any, int], Any] = lambda name, tensor, read: weights.raw(tensor),
) -> str:
    """What makes this folder another than that version's; empty when nothing does.

    take: told name, tensor and how many bytes were read before; answers with the bytes to look at.
    """
    try:
        known = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=weights.Manifest)
    except (OSError, msgspec.DecodeError) as error:
        return f"there is no manifest ({error})"
    if known != manifest:
        return f"it holds version {known.version}, {known.digest[:12]}"
    missing, read = {tensor.name: tensor for tensor in manifest.tensors}, 0
    try:
        for name, tensor in _read(folder):
            entry = missing.pop(name)
            if wrong := weights.wrong_bytes(take(name, tensor, read), entry):
                return wrong
            read += tensor.nbytes
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return f"{min(missing)} is missing" if missing else ""


def collect(root: Path, *, keep: int, spare: Path | None = None) -> list[Path]:
    """Delete all but the newest `keep` versions, and what was left half written; which.

    spare: stays whatever its number is.
    """
    named = [(_NAME.fullmatch(p.name), p) for p in root.glob("version-*")]
    found = [p for _, p in sorted((int(m[1]), p) for m, p in named if m)]
    old = [p for p in (found[:-keep] if keep else found) if p != spare]
    gone = [*old, *root.glob(f"{_WRITING}*")]
    for folder in gone:
        shutil.rmtree(folder, ignore_errors=True)
    return gone


def _shards(manifest: weights.Manifest, shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for spec in manifest.tensors:
        if shards[-1] and size + spec.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(spec.name)
        size += spec.nbytes
    return shards


def _write(path: Path, tensors: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    with as_os_error():
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, str(path))
    _sync(path)


def _read(folder: Path) -> Any:
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with as_os_error():
            shard: Any = safe_open(str(path), framework="pt")
            names = [*shard.keys()]  # not a mapping
        for name in names:
            with as_os_error():
                tensor = shard.get_tensor(name)
            yield name, tensor


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _pace(spec: StoredSpec, read: int, seconds: float) -> None:
    """Between two tensors. Raises OSError when the time is over: who goes on reading then has the
    next one that is sent beside it."""
    if seconds >= spec.timeout_s:
        raise TimeoutError("it was not read when its time was over")
    if spec.bytes_per_s:
        time.sleep(min(spec.timeout_s - seconds, ahead_s(read, seconds, spec.bytes_per_s)))
