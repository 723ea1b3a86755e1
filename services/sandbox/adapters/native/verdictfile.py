"""Reads the verdict files of a verifier that has ended, without trusting one name or link.

Promise: opened relative to the folder that only the verifier could write, never followed, plain
files of bounded size only, and what is wrong with one is said. Standard library only.
"""

from __future__ import annotations

import os
import stat
from typing import Any

VERDICT_FILES = ("reward.json", "reward.txt")
VERDICT_BYTES_MAX = 64 << 10


def read_verdict(folder: str) -> tuple[dict[str, Any], bytes]:
    """The verdict files as bytes, opened without following anything; the box has ended."""
    found: dict[str, Any] = {}
    blob = b""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for name in VERDICT_FILES:
            data, problem = _read_regular(handle, name)
            found[name] = {"size": len(data), "problem": problem}
            blob += data
    finally:
        os.close(handle)
    return {"files": found}, blob


def _read_regular(folder: int, name: str) -> tuple[bytes, str]:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        return b"", "absent"
    except OSError as error:
        return b"", f"not a plain file ({error.strerror})"
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return b"", "not a plain file"
        data = os.read(handle, VERDICT_BYTES_MAX + 1)
    finally:
        os.close(handle)
    if len(data) > VERDICT_BYTES_MAX:
        return b"", f"over {VERDICT_BYTES_MAX} bytes"
    return data, ""
