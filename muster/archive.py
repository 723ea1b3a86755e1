"""A task folder as one deterministic tar, and back, in memory.

Owns: `pack` and `unpack`, and where a file of either format lies in the tar. Promise: the same
files give the same bytes on every machine; only plain files travel; sizes are bounded before
anything is read; unpacking writes nothing to disk. Does not cover: what files mean (task_read.py).
"""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

from muster.errors import InvalidInput
from muster.types import Value

FILES_MAX = 512
FILE_BYTES_MAX = 1 << 20
ARCHIVE_BYTES_MAX = 2 << 20  # a job carries many; one message carries them all
PATH_BYTES_MAX = 200

_TRAVELS = ("instruction.md", "task.toml", "environment", "tests")
BENCH = "task.yaml"  # what tells a folder of Terminal-Bench 1, and stands in its tar
# Of such a folder, what judges it; all else but what is at home lies beside its Dockerfile.
_BENCH_PLACES = {BENCH: BENCH, "tests": "tests", "run-tests.sh": "tests/run-tests.sh"}
_AT_HOME = ("solution", "solution.sh", "solution.yaml", "wrong.sh")


class TaskFile(Value, frozen=True):
    """One file: its mode (0o644 or 0o755) and content."""

    mode: int
    data: bytes


def pack(folder: Path, *, with_solution: bool = False) -> bytes:
    """The task in `folder` as an uncompressed tar.

    What counts travels: instruction.md, task.toml, environment/, tests/; solution/ only when
    asked, so that no box ever holds it. A folder of Terminal-Bench 1 is laid out like that too:
    run-tests.sh in tests/, and what is beside its Dockerfile in environment/. Raises InvalidInput
    for links, devices and oversize.
    """
    files: dict[str, TaskFile] = {}
    total = 0
    for name, place in _places(folder, with_solution):
        for path in _walk(folder, folder / name):
            inner = path.relative_to(folder / name).as_posix()
            packed = place if inner == "." else f"{place}/{inner}"
            if packed in files:
                raise _refusal("two files of the task are one", packed, "rename one of them")
            files[packed] = file = _read(path, path.relative_to(folder).as_posix())
            total += len(file.data)
            if len(files) > FILES_MAX or total > ARCHIVE_BYTES_MAX:
                raise _refusal(
                    "the task is too large",
                    folder,
                    f"at most {FILES_MAX} files and {ARCHIVE_BYTES_MAX} bytes; "
                    "let the Dockerfile make large files with RUN",
                )
    return pack_files(files)


def _places(folder: Path, with_solution: bool) -> list[tuple[str, str]]:
    """Names in the folder, and where they lie in the tar."""
    if not (folder / BENCH).exists():
        return [(name, name) for name in (*_TRAVELS, *(("solution",) if with_solution else ()))]
    if (folder / "task.toml").exists():
        problem = f"a folder is of one format, and this one holds task.toml and {BENCH}"
        raise _refusal(problem, folder, "remove one of them")
    names = sorted(path.name for path in folder.iterdir() if path.name != ".git")
    places = [
        (name, _BENCH_PLACES.get(name, f"environment/{name}"))
        for name in names
        if name not in _AT_HOME
    ]
    return places + [(name, name) for name in _AT_HOME if with_solution and name in names]


def pack_files(files: dict[str, TaskFile]) -> bytes:
    """The same for files in memory; the reverse of `unpack`."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for relative in sorted(files):
            _check_path(relative)
            info = tarfile.TarInfo(relative)
            info.size = len(files[relative].data)
            info.mode = files[relative].mode
            archive.addfile(info, io.BytesIO(files[relative].data))
    return sink.getvalue()


def unpack(archive: bytes) -> dict[str, TaskFile]:
    """Path → file of a packed task; InvalidInput for anything that `pack` would not make."""
    # Headers and padding take up to about 2 kB a file beside the content.
    if len(archive) > ARCHIVE_BYTES_MAX + FILES_MAX * 2048:
        raise _refusal("the archive is too large", len(archive), "send a smaller task")
    files: dict[str, TaskFile] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
            for info in tar:
                files[info.name] = _member(tar, info, files)
    except (tarfile.TarError, ValueError, OverflowError, EOFError, RecursionError) as error:
        told = str(error) or type(error).__name__
        raise _refusal(f"not a readable tar: {told}", "archive", _PACK) from error
    for path in files:
        if any(parent in files for parent in _parents(path)):
            raise _refusal("the archive has a file where a folder must be", path, _PACK)
    return files


_PACK = "pack the folder with muster.taskset.pack"


def _member(tar: tarfile.TarFile, info: tarfile.TarInfo, files: dict[str, TaskFile]) -> TaskFile:
    _check_path(info.name)
    if info.name in files or len(files) >= FILES_MAX:
        raise _refusal("the archive has a path twice, or too many", info.name, _PACK)
    if not info.isreg() or info.issparse():
        raise _refusal("the archive holds something not a plain file", info.name, _PACK)
    if info.size > FILE_BYTES_MAX:
        raise _refusal(f"a file is over {FILE_BYTES_MAX} bytes", info.name, "make it smaller")
    source = tar.extractfile(info)
    data = source.read(info.size) if source else b""
    if len(data) != info.size:
        raise _refusal("the archive is cut short", info.name, _PACK)
    return TaskFile(0o755 if info.mode & 0o100 else 0o644, data)


def _walk(root: Path, path: Path) -> Iterator[Path]:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        for child in sorted(path.iterdir()):
            yield from _walk(root, child)
    elif stat.S_ISREG(mode):
        yield path
    else:
        kind = "a link" if stat.S_ISLNK(mode) else "not a plain file"
        where = path.relative_to(root)
        problem = f"a task holds only folders and plain files; {where} is {kind}"
        raise _refusal(problem, where, "replace it by the file itself")


def _read(path: Path, relative: str) -> TaskFile:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(handle, "rb") as source:
        data = source.read(FILE_BYTES_MAX + 1)
        mode = os.fstat(source.fileno()).st_mode
    if len(data) > FILE_BYTES_MAX:
        problem = f"{relative} is over {FILE_BYTES_MAX} bytes"
        raise _refusal(problem, relative, "let the Dockerfile make it with RUN")
    return TaskFile(0o755 if mode & 0o100 else 0o644, data)


def _check_path(path: str) -> None:
    parts = path.split("/")
    bad = not path or path.startswith("/") or any(part in ("", ".", "..") for part in parts)
    if bad or "\\" in path or not path.isprintable() or len(path.encode()) > PATH_BYTES_MAX:
        way_out = f"use relative paths of at most {PATH_BYTES_MAX} bytes without '..'"
        raise _refusal("a path of the task cannot be used", ascii(path)[:200], way_out)


def _parents(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def _refusal(problem: str, value: object, way_out: str) -> InvalidInput:
    return InvalidInput(problem, field="task", value=value, way_out=way_out)
