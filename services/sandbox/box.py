"""What a box is to the rest of the service: carriers, and the contract of a backend. Pure.

Promise of every backend (tests/contract/test_box.py runs over all of them): a step runs once a
call, under its limits, in the session that earlier steps left; after `seal` no process of the
agent is left and the files stand still; `judge` runs apart from them, over their state; after
`end` nothing of the box is left. Does not cover: turns, epochs, pools (ledger.py, pool.py).
"""

from __future__ import annotations

from typing import Protocol

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


class JudgeSpec(Value, frozen=True):
    """How to run a verifier: `script` below `files`, from `cwd`, with exactly `env`."""

    files: tuple[PutFile, ...]
    script: str
    cwd: str
    env: dict[str, str]
    timeout_s: float
    limits: Limits


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

    async def start(self, box: str, limits: Limits) -> None:
        """A fresh box from the base; on failure nothing is left."""

    async def put(self, box: str, files: tuple[PutFile, ...]) -> None:
        """Write files; parents are made."""

    async def set_session(self, box: str, cwd: str, env: dict[str, str]) -> None:
        """Folder (made if absent) and environment that the next step starts with."""

    async def run(self, box: str, command: str, timeout_s: float) -> Evidence:
        """One step with bash, in the box's session."""

    async def seal(self, box: str) -> None:
        """End every process of the agent for good; the files stay as they are."""

    async def judge(self, box: str, spec: JudgeSpec) -> Judgement:
        """Run a verifier over the sealed files in a box of its own, then end that one."""

    async def end(self, box: str) -> bool:
        """End the box and remove all of it; False when there was none."""
