"""What services note about their boxes, kept for a successor: by the keeper, in memory.

Promise: bounded, each note and all of them together; what several notes share is kept, and counts,
once, for as long as one of them is there. Standard library only.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from typing import Any

NOTE_MAX = 4 << 20
_ALL_MAX = 256 << 20


@dataclass
class Record:
    """shared: the digest of what it shares with others, empty without. newest: the newest turn that
    began, told when the box was sealed."""

    data: bytes = b""
    shared: str = ""
    limits: dict[str, int | float] = field(default_factory=dict)
    sealing: bool = False
    newest: int = -1


class Notes:
    """Of all boxes of a keeper, by name; a box without a note is nothing to a successor."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}
        self._shared: dict[str, bytes] = {}

    @property
    def names(self) -> list[str]:
        return list(self._records)

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        own = sum(len(record.data) for record in self._records.values())
        return own + sum(map(len, self._shared.values()))

    def of(self, box: str) -> Record:
        return self._records[box]

    def shared(self, record: Record) -> bytes:
        return self._shared.get(record.shared, b"")

    def keep(
        self, box: str, limits: dict[str, Any], data: bytes, digest: str = "", shared: bytes = b""
    ) -> bool:
        """The newest note of a box counts; False when what it shares is wanted too.

        Raises OSError when it is too much; the note before it is kept then.
        """
        if digest and not shared and digest not in self._shared:
            return False
        record = self._records.get(box, Record())
        fresh = len(shared) if digest not in self._shared else 0
        size = self.size - len(record.data) + len(data) + fresh
        if len(data) > NOTE_MAX or len(shared) > NOTE_MAX or size > _ALL_MAX:
            problem = f"a note of {len(data)} bytes, {size} of all boxes, is more than is kept"
            raise OSError(errno.ENOSPC, problem)
        if fresh:
            self._shared[digest] = shared
        record.data, record.shared, record.limits = data, digest, limits
        self._records[box] = record
        self._tidy()
        return True

    def seal(self, box: str, newest: int) -> None:
        """No step can run in the box from now on."""
        if box in self._records:
            self._records[box].sealing = True
            self._records[box].newest = newest

    def forget(self, box: str) -> None:
        self._records.pop(box, None)
        self._tidy()

    def _tidy(self) -> None:
        """Let go of what no note shares any more."""
        used = {record.shared for record in self._records.values()}
        for digest in self._shared.keys() - used:
            del self._shared[digest]
