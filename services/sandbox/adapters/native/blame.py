"""Who is to blame when the shell of a step did not start: the agent, or nobody that we can name.

Promise: the agent only on positive evidence: an error code that only its own state can cause, or
a limit of the box that struck at that moment. Anything else is the host's. Pure; standard library
only.
"""

from __future__ import annotations

import errno

ENTER, PREPARE, EXEC = "entering the step's cgroups", "preparing the shell", "starting the shell"

# What execve says when the loader of the shell, a link of the box's own root, is gone or spoiled.
_SHELL_SPOILED = {
    errno.ENOENT, errno.ENOEXEC, errno.EACCES, errno.ELOOP, errno.ENOTDIR, errno.ELIBBAD,
}  # fmt: skip
_LIMIT_STRUCK = {errno.ENOMEM, errno.EAGAIN}


def told(stage: str, number: int, text: str) -> bytes:
    """What the child that could not become the shell writes before it ends."""
    return f"{number} {stage}: {text}"[:400].encode()[:500]


def read(message: bytes) -> tuple[str, int, str]:
    """Stage, error number (0: none) and the whole text for people."""
    number, _, text = message.decode("utf-8", "replace").partition(" ")
    return text.partition(":")[0], int(number) if number.isdecimal() else 0, text


def by_agent(stage: str, number: int, *, shell_there: bool, limit_struck: bool) -> bool:
    """True when the agent broke its box.

    shell_there: bash itself, which lies in the read-only /usr, is still there. limit_struck: a
    counter of the box's own limits grew while the shell was started.
    """
    if number in _LIMIT_STRUCK:
        return limit_struck
    if stage != EXEC:
        return False
    # E2BIG: the variables that the agent exported are too long for the kernel.
    return number == errno.E2BIG or (number in _SHELL_SPOILED and shell_there)
