"""A small task, and the calls of a router, for the tests of a sandbox host."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from muster.archive import TaskFile, pack_files
from muster.types import EpisodeKey, Limits
from services.sandbox.adapters.callers import Acquired
from services.sandbox.driver import SandboxHost

KEY = EpisodeKey("run", "g1", 0, 1, 5)
UNSET = Limits(0, 0, 0, 0, 0)
DOCKERFILE = "FROM scratch\nWORKDIR /job\nENV COLOUR=green\nCOPY given.txt data/\n"
TEST = "test -f answer.txt && cat answer.txt > /logs/verifier/reward.txt"


def package(dockerfile: str = DOCKERFILE, test: str = TEST, toml: str = "") -> dict[str, Any]:
    texts = {
        "instruction.md": "Do it.",
        "task.toml": toml,
        "environment/Dockerfile": dockerfile,
        "environment/given.txt": "given\n",
        "tests/test.sh": test,
    }
    archive = pack_files({path: TaskFile(0o644, text.encode()) for path, text in texts.items()})
    digest = hashlib.sha256(archive).hexdigest()
    return {"name": "task", "digest": digest, "archive": archive, "asked": UNSET, "wait_s": 20.0}


def key(**changes: Any) -> EpisodeKey:
    return msgspec.structs.replace(KEY, **changes)


async def acquire(
    host: SandboxHost, episode: EpisodeKey = KEY, *, fresh: bool = False, **task: str
) -> Acquired:
    return await host.acquire(episode, **package(**task), fresh=fresh)


async def step(
    host: SandboxHost,
    box: str,
    turn: int,
    command: str,
    limit_s: float = 20.0,
    *,
    episode: EpisodeKey = KEY,
) -> str:
    record, _ = await host.execute(episode, box, turn, command, limit_s)
    return (record.evidence.head + record.evidence.tail).decode()
