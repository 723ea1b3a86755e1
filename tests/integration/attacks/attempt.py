"""What an attack is, and the few lines that each one of them starts with."""

from __future__ import annotations

import platform
import shlex
from dataclasses import dataclass

from services.sandbox.adapters.native import seccomp

_COLUMN = 0 if platform.machine() == "x86_64" else 1
_OTHERS = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "process_vm_readv": (310, 270),
    "pidfd_open": (434, 434),
}
NUMBERS = {name: both[_COLUMN] for name, both in (seccomp.DENIED | _OTHERS).items()}

_PRELUDE = f"""
import ctypes, errno, fcntl, os, resource, socket, struct, sys, time
from types import SimpleNamespace
nr = SimpleNamespace(**{NUMBERS})
_libc = ctypes.CDLL(None, use_errno=True)
def _checked(done):
    if done == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return done
class libc:
    def __getattr__(self, name):
        return lambda *given: _checked(getattr(_libc, name)(*map(_long, given)))
libc = libc()
def _long(value):
    return ctypes.c_long(value) if isinstance(value, int) else value
def call(number, *given):
    return _checked(_libc.syscall(_long(number), *map(_long, given)))
def first(names):
    return next(iter(names))
"""


@dataclass(frozen=True)
class Attack:
    """An attempt that a process of a box makes.

    body: Python that raises (or exits with other than 0) unless the attempt succeeded; words like
    @TOKEN@ are filled in by the arena. off: the defences that have to be off for it to succeed,
    each of which stops it alone. lethal: it succeeded when the box is gone.
    """

    name: str
    off: tuple[str, ...]
    body: str
    lethal: bool = False

    def command(self, filled: dict[str, str]) -> str:
        """For bash."""
        body = self.body
        for word, value in filled.items():
            body = body.replace(f"@{word}@", value)
        return f"/usr/bin/python3 -I -c {shlex.quote(_PRELUDE + body)}"
