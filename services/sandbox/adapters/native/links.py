"""Links of the agent's that lead into what is the verifier's own: they are gone there.

An answer that is a link to what the test compares it with (`/tests/expected.txt`), to the verdict,
or by way of /proc to another input of the test, would be right without being one. Promise: in the
box of a verifier, before its script runs, no symbolic link outside of the trusted folders leads
there, whatever other links it goes through, be its target there already or not. Other links stay
as they are. Names are followed by hand, on paper: nothing is opened through a link.
Does not cover: hard links (the agent had nothing of the verifier's to give a second name to), and
links that the script's own programs make. Standard library only; runs in PID 1 of a verifier.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from services.sandbox.adapters.native import layers

OWN = ("/tests", "/logs", "/proc")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_HOPS_MAX = 64  # the kernel follows 40


def cut(root: str = "/") -> int:
    """Unlink them below `root`, on its own mount only; how many there were."""
    here = os.open(root, _FOLDER)
    device = os.fstat(here).st_dev
    found, folders = _cut_in(here, device)
    waiting = [folders]
    while True:
        if waiting[-1]:
            here = layers.step(here, waiting[-1].pop())
            count, folders = _cut_in(here, device)
            found += count
            waiting.append(folders)
            continue
        waiting.pop()
        if not waiting:
            os.close(here)
            return found
        here = layers.step(here, "..")


def leads_there(folder: str, target: str, readlink: Callable[[str], str] = os.readlink) -> bool:
    """Whether a link in `folder` (an absolute path without links) to `target` passes OWN, or is
    the root itself, by which everything has a second name.

    readlink: where a link at that path leads; OSError for what is none.
    """
    at, hops = folder, 0
    left = _parts(target)
    if target.startswith("/"):
        at = "/"
    while left:
        at = os.path.normpath(os.path.join(at, left.pop()))
        if _is_own(at):
            return True
        try:
            link = readlink(at)
        except OSError:
            continue  # no link, or nothing there (yet)
        hops += 1
        if hops > _HOPS_MAX:
            return False  # the kernel follows it nowhere
        left += _parts(link)
        at = "/" if link.startswith("/") else os.path.dirname(at)
    return at == "/"


def _parts(path: str) -> list[str]:
    """The last one first."""
    return [part for part in path.split("/") if part not in ("", ".")][::-1]


def _is_own(path: str) -> bool:
    return any(path == own or path.startswith(own + "/") for own in OWN)


def _cut_in(here: int, device: int) -> tuple[int, list[str]]:
    """Unlink in one folder; and its folders on the same mount."""
    count, folders = 0, []
    with os.scandir(here) as found:
        entries = list(found)
    for entry in entries:
        if entry.is_symlink():
            if _is_snare(here, entry.name):
                os.unlink(entry.name, dir_fd=here)
                count += 1
        elif entry.is_dir(follow_symlinks=False):
            facts = os.stat(entry.name, dir_fd=here, follow_symlinks=False)
            if facts.st_dev == device:
                folders.append(entry.name)
    return count, folders


def _is_snare(here: int, name: str) -> bool:
    try:
        return leads_there(os.readlink(f"/proc/self/fd/{here}"), os.readlink(name, dir_fd=here))
    except OSError:
        return True  # deeper than a path can be: no test looks there by it
