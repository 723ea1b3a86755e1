"""Stream entries that were trimmed from Redis, kept on disk.

Owns: the files `STREAM.mzh` below one folder, or `STREAM.WRITER.mzh`: a file has one writer, for a
former bank that wakes up must not cut off what its follower has written. Promise: `append` returns
once the entries are on disk, also after a power cut; `read` gives them in stream order, each once,
and ignores a torn end (a crash while writing: those entries are still in Redis, for trimming comes
after). Anything else that cannot be read is an error that names the file. Does not cover: payloads,
which are deleted when their group is over; who trims (services/readybank).

A file is a row of frames: 4 bytes little-endian length, then a zstd frame (with its checksum) of
msgpack entries.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zstandard

from muster.errors import InvalidInput
from muster.stream_ids import id_order
from muster.streams import Received

_LENGTH = struct.Struct("<I")
_entries = msgspec.msgpack.Decoder(list[Received])


class History:
    """The kept entries of one run. `writer` names who appends, without dots."""

    def __init__(self, folder: Path, writer: str = ""):
        self._folder, self._writer = folder, writer
        self._whole: dict[str, int] = {}  # stream → size of its file, when it ends with a frame

    def append(self, messages: Sequence[Received]) -> None:
        """Keep entries, which may be of several streams, each stream's in order."""
        by_stream: dict[str, list[Received]] = {}
        for message in messages:
            by_stream.setdefault(message.stream, []).append(message)
        self._folder.mkdir(parents=True, exist_ok=True)
        for stream, found in by_stream.items():
            packer = zstandard.ZstdCompressor(write_checksum=True)
            self._write(stream, packer.compress(msgspec.msgpack.encode(found)))

    def _write(self, stream: str, frame: bytes) -> None:
        path = self._folder / ".".join(filter(None, (stream, self._writer, "mzh")))
        fresh = not path.exists()
        if fresh or self._whole.pop(stream, -1) != path.stat().st_size:
            _cut_torn_end(path)
        with path.open("ab") as file:
            file.write(_LENGTH.pack(len(frame)) + frame)
            file.flush()
            os.fsync(file.fileno())
            self._whole[stream] = file.tell()
        if fresh:
            _sync(self._folder)

    def read(self, stream: str) -> list[Received]:
        """Every kept entry of a stream, in order, without doubles. Raises InvalidInput."""
        found: dict[str, Received] = {}
        for path in kept_in(self._folder, stream):
            self._read(path, found)
        return sorted(found.values(), key=lambda message: id_order(message.id))

    @staticmethod
    def _read(path: Path, found: dict[str, Received]) -> None:
        data, at = path.read_bytes(), 0
        while frame := _frame(data, at):
            try:
                for message in _entries.decode(zstandard.decompress(frame)):
                    found.setdefault(message.id, message)
            except (zstandard.ZstdError, msgspec.DecodeError) as error:
                raise InvalidInput(
                    f"trimmed entries cannot be read at byte {at} ({error})",
                    field="history",
                    value=path,
                    way_out="restore the file, or move it away to see the run without them",
                ) from error
            at += _LENGTH.size + len(frame)


def kept_in(folder: Path, stream: str) -> list[Path]:
    """The files of a stream."""
    return sorted([*folder.glob(f"{stream}.mzh"), *folder.glob(f"{stream}.*.mzh")])


def _frame(data: bytes, at: int) -> bytes:
    """The whole frame at this place, empty when there is none."""
    if at + _LENGTH.size > len(data):
        return b""
    (length,) = _LENGTH.unpack_from(data, at)
    frame = data[at + _LENGTH.size : at + _LENGTH.size + length]
    return frame if len(frame) == length else b""


def _cut_torn_end(path: Path) -> None:
    """Entries written behind a torn frame could not be found again."""
    if not path.exists():
        return
    size, at = path.stat().st_size, 0
    with path.open("rb+") as file:
        while at + _LENGTH.size <= size:
            file.seek(at)
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            if at + _LENGTH.size + length > size:
                break
            at += _LENGTH.size + length
        if at < size:
            file.truncate(at)


def _sync(folder: Path) -> None:
    """A file's name is durable with its folder."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
