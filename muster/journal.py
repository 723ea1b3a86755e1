"""A machine's events and decisions, one JSON line each; replay proves them equal.

Owns: the file format, the hash chain, `verify`. Promise: a journal replayed into a fresh machine
gives the recorded commands byte for byte, else the first difference is named; an edited, missing
or reordered line breaks the chain. Only the last line may be torn (a crash while writing).
"""

from __future__ import annotations

import hashlib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from muster.errors import InvalidInput
from muster.types import Value

_encoder = msgspec.json.Encoder(order="deterministic")
_BEGINS = b'{"machine":'  # as every header does


class Header(Value, frozen=True):
    """First line: which machine, under which rules. `format`: of its events and commands, from the
    rules' `journal_format` (1 where they have none)."""

    machine: str
    rules: Any
    format: int = 1


class Line(Value, frozen=True):
    """One handled event. `chain` = sha256(former chain + the other fields)."""

    now: float
    event: msgspec.Raw
    commands: list[msgspec.Raw]
    chain: str


class Replay(Value, frozen=True):
    """What verify found."""

    file: str
    machine: str
    events: int  # timer ticks not counted
    commands: int
    problem: str = ""


class Journal:
    """Appends to one file; one file per incarnation of a machine."""

    def __init__(self, path: Path, machine: str, rules: object):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = _unused(path).open("xb")
        header = _encoder.encode(Header(machine, rules, _format(rules)))
        self._chain = _link("", header)
        self._file.write(header + b"\n")
        self._file.flush()

    def record(self, now: float, event: object, commands: list[Any]) -> None:
        """Write one line. Flushed to the system at once, so SIGKILL loses at most a torn line."""
        at, told, asked = (_encoder.encode(part) for part in (now, event, commands))
        self._chain = _link(self._chain, b"[%b,%b,%b]" % (at, told, asked))
        # A Line by hand: each part is encoded once, for the chain and for the file.
        line = b'{"now":%b,"event":%b,"commands":%b,"chain":"%b"}\n'
        self._file.write(line % (at, told, asked, self._chain.encode()))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _unused(path: Path) -> Path:
    """`path`, or the first of `name-2`, `name-3` … that does not exist: nothing is overwritten."""
    found, number = path, 2
    while found.exists():
        found = path.with_stem(f"{path.stem}-{number}")
        number += 1
    return found


def _link(chain: str, body: bytes) -> str:
    return hashlib.sha256(chain.encode() + body).hexdigest()


def verify(path: Path) -> Replay:
    """Replay a journal through the machine that wrote it.

    Raises InvalidInput when the file is no journal or its machine is not installed.
    """
    with path.open("rb") as file:
        try:
            first = file.readline()
            if not first.endswith(b"\n") and _BEGINS.startswith(first[: len(_BEGINS)]):
                return Replay(str(path), "ended at its start", 0, 0)  # torn by a crash
            header = msgspec.json.decode(first, type=Header)
            kind: Any = entry_points(group="muster.machines")[header.machine].load()
            if header.format == _format(kind.rules_type):
                machine = kind(msgspec.convert(header.rules, kind.rules_type))
            else:
                raise _other_format(path, header, _format(kind.rules_type))
        except (msgspec.DecodeError, KeyError) as error:
            raise InvalidInput(
                f"not a journal of a known machine ({error})",
                field="FILE",
                value=path,
                way_out="name a file from the state folder's journal/",
            ) from error
        events = commands = number = 0
        chain = _link("", first.rstrip(b"\n"))
        for text in file:
            number += 1
            problem, chain, line = _step(machine, kind, text, chain)
            if line is None and not text.endswith(b"\n"):
                break  # torn by a crash: everything before it stands
            if line is not None:
                commands += len(line.commands)
                decoded = msgspec.json.decode(line.event, type=kind.event_type)
                events += not isinstance(decoded, kind.tick_type)
            if problem:
                return Replay(
                    str(path), header.machine, events, commands, f"line {number + 1}: {problem}"
                )
    return Replay(str(path), header.machine, events, commands)


def _format(rules: object) -> int:
    return int(getattr(rules, "journal_format", 1))


def _other_format(path: Path, header: Header, ours: int) -> InvalidInput:
    age = "an older" if header.format < ours else "a newer"
    return InvalidInput(
        f"this journal of the {header.machine} was written by {age} Muster: its commands have "
        f"format {header.format}, this one replays format {ours}",
        field="FILE",
        value=path,
        way_out="replay it with the Muster that wrote it",
    )


def _step(machine: Any, kind: Any, text: bytes, chain: str) -> tuple[str, str, Line | None]:
    try:
        line = msgspec.json.decode(text, type=Line)
        event = msgspec.json.decode(line.event, type=kind.event_type)
    except msgspec.DecodeError as error:
        return f"unreadable: {error}", chain, None
    # Over the bytes as they stand, so that any edit shows, also one that decodes to the same.
    chain = _link(chain, _encoder.encode([line.now, line.event, line.commands]))
    if chain != line.chain:
        return "the line is not the one that was recorded (chain broken)", chain, line
    again = [_encoder.encode(c) for c in machine.handle(event, line.now)]
    recorded = [bytes(c) for c in line.commands]
    if again != recorded:
        index = next(
            (i for i, (a, b) in enumerate(zip(again, recorded, strict=False)) if a != b),
            min(len(again), len(recorded)),
        )
        wanted = recorded[index].decode() if index < len(recorded) else "nothing"
        found = again[index].decode() if index < len(again) else "nothing"
        return f"decision {index}: recorded {wanted}, replay {found}", chain, line
    return "", chain, line
