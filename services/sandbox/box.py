"""What a box is to the rest of the service: carriers, and the contract of a backend. Pure.

Promise of every backend (tests/contract/test_box.py runs over all of them): a step runs once a
call, under its limits, in the session that earlier steps left; after `seal` no process of the
agent is left and the files stand still; `judge` runs apart from them, over their state; after
`end` nothing of the box is left; boxes started from one snapshot see its files as they were and
change nothing of each other's. Does not cover: turns, epochs, pools (ledger.py, pool.py), which
snapshots there are (layers.py).
"""

from __future__ import annotations

from typing import Protocol

from muster.archive import TaskFile
from muster.types import Limits, Value


class PutFile(Value, frozen=True):
    """A file to write into a box: absolute path, permission bits, content."""

    path: str
    mode: int
    data: bytes


class Evidence(Value, frozen=True):
    """What was measured about one step; times in seconds.

    cpu_s: processor time of the agent's processes during the step, also of those that earlier steps
    left running. *_stall_s: time in which at least one of the step's processes waited for a
    processor, for memory or for a disk; -1 where the kernel does not tell.
    exit_code is 128 + signal when a signal ended the shell. oom_kills, pids_refused: how often the
    box's limit struck during the step. broken: why the box can run nothing any more, by the
    agent's own doing and on positive evidence of it; it is scored as the model's failure.
    """

    exit_code: int = 0
    signal: int = 0
    timed_out: bool = False
    oom_kills: int = 0
    pids_refused: int = 0
    disk_full: bool = False
    wall_s: float = 0.0
    cpu_s: float = 0.0
    head: bytes = b""
    tail: bytes = b""
    total: int = 0
    broken: str = ""
    cpu_stall_s: float = -1.0
    memory_stall_s: float = -1.0
    io_stall_s: float = -1.0


class Judgement(Value, frozen=True):
    """A verifier's run: its shell's evidence, and the verdict files as found.

    files: name → content; problems: name → why a file could not be read ("absent" among them).
    """

    evidence: Evidence
    files: dict[str, bytes] = {}
    problems: dict[str, str] = {}


class Source(Value, frozen=True):
    """What a box starts from: a base by its name (bases.py), and a snapshot on top of it.

    layer: a name given to `snapshot` or `squash` before; empty for the bare base.
    """

    base: str = "host"
    layer: str = ""


class Snapshot(Value, frozen=True):
    """What `snapshot` froze: bytes of its own files, layers above the base (itself included), and
    the session, which a box started from it has to be given again."""

    size: int = 0
    depth: int = 1
    cwd: str = "/"
    env: dict[str, str] = {}


class KeptStep(Value, frozen=True):
    """A finished step whose answer its box keeps."""

    turn: int
    command: str
    evidence: Evidence


class Survivor(Value, frozen=True):
    """A box that lives though the service that made it is gone.

    note: what that service noted last (`note`), `shared` with it. kept: the newest finished steps,
    oldest first.
    running: turn and command of a step that runs still, to be had from `rejoin`. newest_turn: the
    newest that began, -1 before the first. sealed: no step can run any more.
    """

    box: str
    limits: Limits
    note: bytes = b""
    kept: tuple[KeptStep, ...] = ()
    running: tuple[int, str] | None = None
    newest_turn: int = -1
    sealed: bool = False
    shared: bytes = b""


class JudgeSpec(Value, frozen=True):
    """How to run a verifier: `script` below `files`, from `cwd`, with exactly `env`; where an image
    was built, over what it says of itself (an empty `cwd` is its own folder).

    live: beside the agent's living processes, in their network and with a file system of its own,
    which is what the box started from; else over the sealed files of the box.
    """

    files: tuple[PutFile, ...]
    script: str
    cwd: str
    env: dict[str, str]
    timeout_s: float
    limits: Limits
    live: bool = False


class CopiedFile(Value, frozen=True):
    """A file, folder or link of a copy; `path` is relative. kind: file, folder or link."""

    path: str
    kind: str = "file"
    mode: int = 0o644
    data: bytes = b""
    link: str = ""


HOST = Source()


class BoxFailure(Exception):
    """The backend could not do it: not the agent's doing, as far as anybody can show."""


class Backend(Protocol):
    """Makes boxes. All methods may raise BoxFailure; what a step did is then not known.

    Only a box that its agent broke, as the kernel's counters or error codes show, is told as
    evidence (`broken`): a late or dead part of the host is BoxFailure.
    """

    @property
    def tells_stall(self) -> bool:
        """Whether the evidence of steps has figures for pressure stall."""

    @property
    def builds(self) -> bool:
        """Whether it builds whole Dockerfiles itself (`build`); else the service runs the lines
        of the small part that it can read (environment.py)."""

    async def build(self, content: str, context: dict[str, TaskFile], timeout_s: float) -> Source:
        """Build environment/Dockerfile with the files of its folder; only where `builds`.

        content: names what is built. Raises InvalidInput for a Dockerfile that does not build.
        """

    async def start(self, box: str, limits: Limits, source: Source = HOST) -> None:
        """A fresh box from `source`; on failure nothing is left."""

    async def alive(self, box: str) -> bool:
        """Whether a step could begin in it now, as its own PID 1 answers."""

    async def snapshot(self, box: str, layer: str, *, keep: bool) -> Snapshot:
        """Freeze the files of a box, in which no step runs, under a new name.

        keep: the box goes on, with its processes, and what is copied is what it changed. Else it
        ends and nothing is copied. What is kept running is an agent's: a verifier of a box that
        starts from it takes none of its tools from there, but from the set-ups below.
        """

    async def squash(self, layer: str, into: str) -> Snapshot:
        """The same files as one layer over the base, under a new name."""

    async def drop(self, layer: str) -> bool:
        """Remove a snapshot that no box and no other snapshot uses; False when there is none.

        What was built has the name of its content. A squashed snapshot uses the set-ups that it
        came from, for its verifiers.
        """

    async def copy_in(self, box: str, folder: str, files: tuple[CopiedFile, ...]) -> None:
        """Write files, folders and links below `folder`; nothing is written outside of it."""

    async def copy_out(self, box: str, path: str, bytes_max: int) -> tuple[CopiedFile, ...]:
        """A file or folder as it is now. Raises InvalidInput (field `path`) for what is absent,
        over `bytes_max`, or holds a device, a FIFO, a socket or a link that leaves it."""

    async def note(self, box: str, data: bytes, shared: bytes = b"") -> None:
        """Keep this with the box for a successor of this service; the newest note counts.

        shared: what the notes of many boxes have in common; kept once for all that are alike.
        """

    async def survivors(self) -> tuple[Survivor, ...]:
        """Boxes of a former service of this instance, which are ours from now on."""

    async def claim(self, layers: tuple[str, ...]) -> None:
        """Go on with these snapshots of a former service; the others go, those that boxes stand on
        with their boxes. To be said once, after `survivors`."""

    async def stopping(self) -> None:
        """The service was asked to stop: from now on no box outlives it, however it ends."""

    async def rejoin(self, box: str) -> Evidence:
        """The evidence of a survivor's running step, once it has ended."""

    async def put(self, box: str, files: tuple[PutFile, ...]) -> None:
        """Write files; parents are made."""

    async def set_session(self, box: str, cwd: str, env: dict[str, str]) -> None:
        """Folder (made if absent) and environment that the next step starts with.

        In a box from an image that was built, over what the image says; an empty `cwd` is its own.
        """

    async def run(self, box: str, command: str, timeout_s: float, turn: int = -1) -> Evidence:
        """One step with bash, in the box's session; with a turn its answer is kept (Survivor)."""

    async def seal(self, box: str) -> None:
        """End every process of the agent for good; the files stay as they are."""

    async def judge(self, box: str, spec: JudgeSpec) -> Judgement:
        """Run a verifier in a box of its own, then end that one: over the sealed files, or, with
        `spec.live`, beside the living box."""

    async def end(self, box: str) -> bool:
        """End the box and remove all of it; False when there was none."""
