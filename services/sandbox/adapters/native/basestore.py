"""Makes the folders and tarballs of `sandbox.bases` ready, each under the digest of its content.

Owns: the cache of unpacked tarballs (`<cache>/<sha256 of the file>/root`). Promise: a base's name
tells its content: for a tarball the sha256 of the file, for a folder that of a list of all paths
below it with kind, mode, owner and the sha256 of each file, so that any change but that of times
gives another name, and a copy elsewhere the same. A tarball is unpacked once, into a folder of its
own that gets its name when it is whole; hosts that share the cache wait for each other. Problems
are ConfigErrors that name field and value. Does not cover: a folder that is changed while its host
runs: stop the host first.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from muster import telemetry
from muster.errors import ConfigError
from services.sandbox.adapters.native.basefolder import trouble
from services.sandbox.adapters.native.basetar import BadTarball, Bounds, unpack
from services.sandbox.bases import HOST, BaseSetting, Kind

_log = telemetry.logger("muster.sandbox")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CHUNK = 1 << 20
_PREFIX = "sha256:"
_LOCK_PAUSE_S = 0.1
_NEEDED = (
    "use one with /usr/bin/bash and /usr/bin/env, as debootstrap or `docker export` makes them "
    "(what `docker save` makes is no root file system)"
)


@dataclass(frozen=True)
class Prepared:
    """names: pattern → base (for bases.Bases); folders: base → its folder on this machine."""

    names: dict[str, str] = field(default_factory=dict)
    folders: dict[str, str] = field(default_factory=dict)


async def prepare(
    settings: Mapping[str, BaseSetting], cache: Path, bounds: Bounds | None = None
) -> Prepared:
    """Digest and unpack what the settings name; reads every byte of it. Raises ConfigError."""
    stop = threading.Event()
    try:
        return await asyncio.to_thread(_prepare, settings, cache, bounds or Bounds(), stop.is_set)
    finally:
        stop.set()  # a thread goes on when its caller has gone


def _prepare(
    settings: Mapping[str, BaseSetting], cache: Path, bounds: Bounds, stopped: Callable[[], bool]
) -> Prepared:
    done = Prepared()
    for pattern, setting in settings.items():
        if setting.kind is Kind.HOST:
            done.names[pattern] = HOST
            continue
        problem, way_out = "", "give the path of a root file system folder or a tarball of one"
        try:
            digest, folder = _ready(setting, cache, bounds, stopped)
            problem = trouble(folder)
            way_out = _NEEDED
        except (BadTarball, OSError) as error:
            problem = getattr(error, "strerror", None) or str(error)
        if problem:
            raise ConfigError(
                f"cannot be a base: {problem}",
                field=f'sandbox.bases."{pattern}"',
                value=setting.where,
                way_out=way_out,
            )
        if setting.digest and setting.digest != digest:
            raise ConfigError(
                f"has the digest {_PREFIX}{digest}, not the one given",
                field=f'sandbox.bases."{pattern}"',
                value=f"{setting.where}@{_PREFIX}{setting.digest}",
                way_out="restore what was meant, or give this digest",
            )
        done.names[pattern] = _PREFIX + digest
        done.folders[_PREFIX + digest] = folder
    return done


def _ready(
    setting: BaseSetting, cache: Path, bounds: Bounds, stopped: Callable[[], bool]
) -> tuple[str, str]:
    """Digest, and the folder with the root file system."""
    path = Path(setting.where)
    if setting.kind is Kind.FOLDER:
        return folder_digest(path, stopped), os.path.realpath(path)
    digest = file_digest(path, stopped)
    if setting.digest and digest != setting.digest:
        return digest, "/"  # not unpacked: it is refused next, whatever it holds
    return digest, str(_unpacked(path, digest, cache, bounds, stopped))


def file_digest(path: Path, stopped: Callable[[], bool] = lambda: False) -> str:
    """sha256 of a file, hexadecimal. Raises OSError."""
    with path.open("rb") as file:
        return _hashed(file.fileno(), stopped)


def folder_digest(folder: Path, stopped: Callable[[], bool] = lambda: False) -> str:
    """sha256 of everything below a folder but times, hexadecimal. Raises OSError."""
    told = hashlib.sha256()
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for line in _lines(handle, "", stopped):
            told.update(len(line).to_bytes(8, "little") + line)
    finally:
        os.close(handle)
    return told.hexdigest()


def _lines(folder: int, path: str, stopped: Callable[[], bool]) -> Iterator[bytes]:
    """One for each entry, by name; links are read, not followed."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries)
    for name in names:
        facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
        mode, what = facts.st_mode, ""
        if stat.S_ISLNK(mode):
            what = os.readlink(name, dir_fd=folder)
        elif stat.S_ISREG(mode):
            with open(os.open(name, _FILE, dir_fd=folder), "rb") as file:
                what = _hashed(file.fileno(), stopped)
        line = f"{path}/{name}\0{mode:o} {facts.st_uid} {facts.st_gid}\0{what}"
        yield os.fsencode(line)
        if stat.S_ISDIR(mode):
            inner = os.open(name, _FOLDER, dir_fd=folder)
            try:
                yield from _lines(inner, f"{path}/{name}", stopped)
            finally:
                os.close(inner)


def _hashed(handle: int, stopped: Callable[[], bool]) -> str:
    told = hashlib.sha256()
    while data := os.read(handle, _CHUNK):
        if stopped():
            raise InterruptedError("stopped while a base was read")
        told.update(data)
    return told.hexdigest()


def _unpacked(
    tarball: Path, digest: str, cache: Path, bounds: Bounds, stopped: Callable[[], bool]
) -> Path:
    """The folder of a tarball in the cache, unpacked if it is not there yet."""
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    done = cache / digest
    with _alone(cache / f"{digest}.lock", stopped):
        if not done.is_dir():
            part = cache / f".{digest}.part"
            if part.exists():
                shutil.rmtree(part)  # of one that was killed: nobody else holds the lock
            try:
                (part / "root").mkdir(parents=True)
                found = unpack(tarball, part / "root", bounds, stopped)
                os.sync()  # whole on the disk before it gets its name
                part.rename(done)
            except BaseException:
                shutil.rmtree(part, ignore_errors=True)
                raise
            _log.info("base %s: %d entries, %d left out", digest, found.files, found.skipped)
    return done / "root"


@contextmanager
def _alone(lock: Path, stopped: Callable[[], bool]) -> Iterator[None]:
    """One at a time over all hosts that share the cache; InterruptedError once stopped."""
    with lock.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if stopped():
                    raise InterruptedError("stopped while another host unpacked a base") from None
                time.sleep(_LOCK_PAUSE_S)
        yield
