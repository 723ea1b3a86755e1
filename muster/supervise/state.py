"""What a supervisor holds on a machine, written down so that its successor can clear it away.

Owns: the lock, `supervisor.json` and `router.address` in the state folder, the private runtime
folder (sockets and TMPDIR of all services). Promise: one supervisor per state folder; after
`release` or the next `claim`, nothing of an earlier one is left: processes by pid and start time,
the runtime folder, folders that a start made and nothing came into.
Does not cover: cgroups and boxes (the sandbox service clears its own at start).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
from pathlib import Path
from typing import IO

import msgspec

from muster.errors import HostUnfit, Refused
from muster.supervise import procfs
from muster.supervise.procfs import Identity
from muster.types import Value

_KILL_S = 5.0
_ROUTER = "router.address"
_LOCK = "supervisor.lock"


class Child(Value, frozen=True):
    """A service: its guard (leads its process group) and its own process; `starts` counts them."""

    guard: Identity | None
    process: Identity | None = None
    starts: int = 1


class Holding(Value, frozen=True):
    """The content of supervisor.json."""

    supervisor: Identity
    runtime: str
    children: dict[str, Child] = {}


def runtime_dir(state_dir: Path) -> Path:
    """Short, so that socket paths fit in 108 bytes; the same for the same state folder."""
    digest = hashlib.sha256(str(state_dir).encode()).hexdigest()[:12]
    return Path("/tmp") / f"muster-{digest}"


class Claim:
    """The right to run services from a state folder."""

    def __init__(self, state_dir: Path, lock: IO[str], made: Path | None = None):
        self.state_dir, self._lock, self._made = state_dir, lock, made
        self.runtime = runtime_dir(state_dir)
        self.children: dict[str, Child] = {}

    def write(self) -> None:
        """Record what is held now; whole or not at all."""
        me = procfs.identify(os.getpid())
        assert me is not None
        holding = Holding(me, str(self.runtime), self.children)
        path = self.state_dir / "supervisor.json"
        aside = path.with_suffix(".new")
        aside.write_bytes(msgspec.json.format(msgspec.json.encode(holding), indent=1) + b"\n")
        aside.replace(path)

    def release(self) -> list[str]:
        """Give everything back; what could not be cleared, as lines for people."""
        left = sweep(self.state_dir)
        if self._made is not None:
            _remove_empty(self.state_dir, self._made)
        self._lock.close()
        return left


def claim(state_dir: Path) -> tuple[Claim, list[str]]:
    """Lock the state folder and clear away what a killed predecessor left there.

    Returns the claim and a line per thing that was cleared. Raises Refused while another
    supervisor lives, HostUnfit when the runtime folder's name is taken by somebody else.
    """
    made = _first_missing(state_dir)
    state_dir.mkdir(parents=True, exist_ok=True)
    lock = _locked(state_dir)
    cleared = sweep(state_dir)
    claimed = Claim(state_dir, lock, made)
    _private(claimed.runtime)
    claimed.write()
    return claimed, cleared


def _locked(state_dir: Path) -> IO[str]:
    path = state_dir / _LOCK
    while True:
        lock = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            holder = read(state_dir)
            who = f" (process {holder.supervisor.pid})" if holder else ""
            raise Refused(
                f"another muster is running with this state folder{who}",
                field="state_dir",
                value=state_dir,
                way_out="stop it with Ctrl-C, or set another state_dir",
            ) from None
        # One that ended may have removed the file between the two lines above.
        if path.exists() and os.fstat(lock.fileno()).st_ino == path.stat().st_ino:
            return lock
        lock.close()
        state_dir.mkdir(parents=True, exist_ok=True)


def read(state_dir: Path) -> Holding | None:
    """The newest record, None when there is none that can be read."""
    try:
        return msgspec.json.decode((state_dir / "supervisor.json").read_bytes(), type=Holding)
    except (OSError, msgspec.DecodeError):
        return None


def write_router_address(state_dir: Path, address: str) -> None:
    """Say where the router in charge listens; whole or not at all."""
    aside = state_dir / f"{_ROUTER}.new"
    aside.write_text(f"{address}\n", encoding="utf-8")
    aside.replace(state_dir / _ROUTER)


def router_address(state_dir: Path) -> str:
    """Where the router of the `muster up` with this state folder listens; "" when none runs."""
    try:
        return (state_dir / _ROUTER).read_text("utf-8").strip()
    except OSError:
        return ""


def sweep(state_dir: Path) -> list[str]:
    """End recorded processes, remove the runtime folder; call only under the lock."""
    runtime = runtime_dir(state_dir)
    holding = read(state_dir)
    victims = set(procfs.with_environment(f"TMPDIR={runtime}".encode()))
    for child in holding.children.values() if holding else ():
        victims.update(who for who in (child.guard, child.process) if who)
        if child.guard and procfs.alive(child.guard):
            victims.update(_group(child.guard.pid))
    victims = {who for who in victims if procfs.alive(who)}
    victims.update(procfs.descendants(who.pid for who in victims))
    lines = [f"ended process {who.pid}" for who in sorted(victims, key=lambda who: who.pid)]
    stuck = procfs.kill_and_wait(victims, _KILL_S)
    lines += [f"process {who.pid} could not be ended" for who in stuck]
    if _ours(runtime):
        shutil.rmtree(runtime, ignore_errors=True)
        lines.append(f"removed {runtime}")
    for name in ("supervisor.json", _ROUTER):
        (state_dir / name).unlink(missing_ok=True)
    return lines


def _first_missing(path: Path) -> Path | None:
    """The outermost folder that has to be made for `path`, None when it is there."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    return missing[-1] if missing else None


def _remove_empty(state_dir: Path, made: Path) -> None:
    """Remove what a start that came to nothing has made: empty folders and the lock."""
    lock = state_dir / _LOCK
    kept = [path for path in state_dir.rglob("*") if not path.is_dir() and path != lock]
    if kept:
        return
    shutil.rmtree(state_dir, ignore_errors=True)
    for folder in state_dir.parents:
        if not folder.is_relative_to(made) or any(folder.iterdir()):
            return
        folder.rmdir()


def _group(leader: int) -> list[Identity]:
    members = (procfs.identify(pid) for pid in procfs.pids() if procfs.group_of(pid) == leader)
    return [who for who in members if who]


def _ours(path: Path) -> bool:
    try:
        info = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid()


def _private(path: Path) -> None:
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        raise HostUnfit(
            "this name is needed for sockets, and something else stands there",
            field="runtime folder",
            value=path,
            way_out="remove it, or set another state_dir",
        ) from None
    path.chmod(0o700)  # whatever the umask
