"""What services note about their boxes, kept for a successor: by the keeper, in memory.

Promise: bounded, each note and all of them together. Standard library only.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from typing import Any

NOTE_MAX = 4 << 20
_ALL_MAX = 256 << 20


@dataclass
class Record:
    """newest: the newest turn that began, told when the box was sealed."""

    data: bytes = b""
    limits: dict[str, int | float] = field(default_factory=dict)
    sealing: bool = False
    newest: int = -1


class Notes:
    """Of all boxes of a keeper, by name; a box without a note is nothing to a successor."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}
        self._size = 0

    @property
    def names(self) -> list[str]:
        return list(self._records)

    def of(self, box: str) -> Record:
        return self._records[box]

    def keep(self, box: str, limits: dict[str, Any], data: bytes) -> None:
        """The newest note of a box counts. Raises OSError when it is too much."""
        record = self._records.get(box, Record())
        size = self._size + len(data) - len(record.data)
        if len(data) > NOTE_MAX or size > _ALL_MAX:
            problem = f"a note of {len(data)} bytes, {size} of all boxes, is more than is kept"
            raise OSError(errno.ENOSPC, problem)
        record.data, record.limits = data, limits
        self._records[box], self._size = record, size

    def seal(self, box: str, newest: int) -> None:
        """No step can run in the box from now on."""
        if box in self._records:
            self._records[box].sealing = True
            self._records[box].newest = newest

    def forget(self, box: str) -> None:
        record = self._records.pop(box, None)
        if record:
            self._size -= len(record.data)
