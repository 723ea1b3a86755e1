"""What a service leaves with each box, for the next one of its instance to go on. Pure.

Promise: a note that cannot be read, or that another release wrote, is no note: its box ends. A box
is taken over only when every step of it has its answer, or runs still. Does not cover: where notes
lie (the backend), what the next owner makes of the box (pool.py).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import lru_cache

import msgspec
from msgspec.structs import replace

from muster.archive import ARCHIVE_BYTES_MAX
from muster.types import EpisodeKey, Limits, Value
from services.sandbox.box import Snapshot, Survivor
from services.sandbox.layers import Layer

_FORM = 2
_PLAIN_MAX = 2 * ARCHIVE_BYTES_MAX  # headers and padding included


class Note(Value, frozen=True):
    """A box in use. The task's archive, in which the verifier's files are, is what notes share.

    digest: of that. layers: what the box stands on, top first. forked_from, newest: the box that it
    was forked from, and the turn that had run in that one. made, start_s: how it came to be, as its
    caller was told. since: when it was asked for, on the clock of this machine.
    """

    key: EpisodeKey
    task: str
    digest: str
    limits: Limits
    base: str
    layers: tuple[Layer, ...] = ()
    newest: int = -1
    forked_from: str = ""
    made: str = "COLD"
    start_s: float = 0.0
    since: float = 0.0
    form: int = _FORM


def without_session(layer: Layer) -> Layer:
    """A snapshot as notes have it: no box starts from a fork's after its service has gone, and what
    an agent exported is no concern of a note."""
    return replace(layer, told=Snapshot(layer.told.size, layer.told.depth))


@lru_cache(maxsize=16)
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


def newest_of_each(found: Iterable[tuple[str, Note]]) -> set[str]:
    """Of boxes with their notes: those that go on. An attempt has one box: when the end of an older
    one failed, that is not it."""
    newest: dict[EpisodeKey, tuple[float, str]] = {}
    for box, note in found:
        attempt = replace(note.key, owner_epoch=0)
        newest[attempt] = max(newest.get(attempt, (note.since, box)), (note.since, box))
    return {box for _, box in newest.values()}
