"""Processes that have a terminal, as those that a person starts in one have."""

from __future__ import annotations

import fcntl
import os
import pty
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def terminal() -> Iterator[dict[str, Any]]:
    """What `subprocess.Popen` is given so that the process leads a session on a new terminal."""
    ours, theirs = pty.openpty()

    def take() -> None:
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    try:
        yield {"start_new_session": True, "preexec_fn": take, "pass_fds": (theirs,)}
    finally:
        os.close(ours)
        os.close(theirs)


def terminal_of(pid: int | str) -> int:
    """Number of the terminal that a live process has; 0: none."""
    return int(Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[4])
