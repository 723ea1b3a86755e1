"""What a service leaves with each box, for the next one of its instance to go on. Pure.

Promise: a note that cannot be read, or that another release wrote, is no note: its box ends. A box
is taken over only when every step of it has its answer, or runs still. Does not cover: where notes
lie (the backend), what the next owner makes of the box (pool.py).
"""

from __future__ import annotations

import zlib

import msgspec

from muster.archive import ARCHIVE_BYTES_MAX
from muster.types import EpisodeKey, Limits, Value
from services.sandbox.box import Survivor
from services.sandbox.layers import Layer

_FORM = 1
_PLAIN_MAX = 2 * ARCHIVE_BYTES_MAX  # headers and padding included


class Note(Value, frozen=True):
    """A box in use.

    archive: the task's, compressed: the verifier's files are in it. newest: the turn that had run
    before the box's own first (of a fork). layers: what it stands on, top first.
    """

    key: EpisodeKey
    task: str
    digest: str
    archive: bytes
    limits: Limits
    base: str
    layers: tuple[Layer, ...] = ()
    newest: int = -1
    form: int = _FORM


def packed(archive: bytes) -> bytes:
    """A task's archive as notes carry it."""
    return zlib.compress(archive, 1)


def unpacked(data: bytes) -> bytes:
    """The reverse; ValueError for anything else."""
    reader = zlib.decompressobj()
    try:
        found = reader.decompress(data, _PLAIN_MAX)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not reader.eof:
        raise ValueError("too large, or cut short")
    return found


def write(note: Note) -> bytes:
    return msgspec.msgpack.encode(note)


def read(survivor: Survivor) -> Note | str:
    """The note of a box that can be gone on with, or why it has to end."""
    if not survivor.note:
        return "nobody used it"
    try:
        note = msgspec.msgpack.decode(survivor.note, type=Note)
    except msgspec.DecodeError as error:
        return f"its note cannot be read: {error}"
    if note.form != _FORM:
        return f"its note has form {note.form}"
    answered = {step.turn for step in survivor.kept} | {-1, note.newest}
    # Files are sealed only when no step runs and the last one's answer is known.
    told = survivor.sealed or survivor.running is not None or survivor.newest_turn in answered
    if not told:
        return f"the result of turn {survivor.newest_turn} was lost"
    return note
