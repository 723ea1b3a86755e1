"""One keeper an instance: a file lock that a just-killed predecessor may still hold a moment."""

from __future__ import annotations

import fcntl
import os
import time

from services.sandbox.adapters.native.cgroups import CgroupTrouble

_WAIT_S = 5.0


def take(runtime_dir: str) -> int:
    """The instance's lock; a predecessor that was just killed may still be tidying."""
    path = os.path.join(runtime_dir, "lock")
    deadline = time.monotonic() + _WAIT_S
    while True:
        os.makedirs(runtime_dir, mode=0o700, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The predecessor removes the file as its last act: ours must be the one at the path.
            if os.path.exists(path) and os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise CgroupTrouble(
                    f"another sandbox host uses {runtime_dir}",
                    "stop it, or give this one another sandbox.runtime_dir",
                ) from None
        os.close(handle)
        time.sleep(0.02)
