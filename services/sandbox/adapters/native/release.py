"""Which code this is: a keeper is taken over only by a service of the same, for they share their
words, and boxes run what their keeper had read. Standard library only.
"""

from __future__ import annotations

import hashlib
import os


def digest() -> str:
    """Of every module beside this one."""
    folder = os.path.dirname(os.path.abspath(__file__))
    whole = hashlib.sha256()
    for name in sorted(os.listdir(folder)):
        if name.endswith(".py"):
            with open(os.path.join(folder, name), "rb") as file:
                whole.update(name.encode() + b"\0" + file.read() + b"\0")
    return whole.hexdigest()[:16]
