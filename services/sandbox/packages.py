"""The tasks that this host was sent of late, unpacked once. Pure.

Promise: an archive is taken only under its own digest; at most `kept` are held, the ones used last.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from muster.archive import unpack
from muster.errors import InvalidInput
from muster.taskset import Task, TaskFile, task_from_archive


class KnownTasks:
    """Task packages by digest."""

    def __init__(self, kept: int):
        self._kept = kept
        self._found: OrderedDict[str, tuple[Task, dict[str, TaskFile]]] = OrderedDict()

    def task(self, name: str, digest: str, archive: bytes) -> tuple[Task, dict[str, TaskFile]]:
        """The task and its files. InvalidInput for another digest, or a package that is no task."""
        found = self._found.get(digest)
        if found is None:
            if hashlib.sha256(archive).hexdigest() != digest:
                raise InvalidInput(
                    "is not the sha256 of the archive",
                    field="task.digest",
                    value=digest[:80],
                    way_out="send the archive as it was packed",
                )
            found = self._found[digest] = (task_from_archive(archive, name=name), unpack(archive))
            if len(self._found) > self._kept:
                self._found.popitem(last=False)
        self._found.move_to_end(digest)
        return found
