"""The job of a simulation: its tasks, and a tokenizer that costs nothing.

Owns: two tiny tasks in Harbor's form, the toy vocabulary. Promise: text → ids → text is the
identity; the same text has the same ids within one process, whatever came before.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Sequence
from zlib import crc32

from muster.archive import TaskFile, pack_files
from muster.taskset import Task, task_from_archive
from services.router.blocks import BlockChain
from services.router.context import Context, pack
from services.router.events import Message

JOB = "job"
EVALUATION = "held"  # the job that no trainer may ever get


def evaluates(group: str) -> bool:
    """True for a group of the evaluation."""
    return group.startswith(f"{EVALUATION}-")


_TOML = """schema_version = "1.4"
[task]
name = "sim/{name}"
[environment]
network_mode = "no-network"
[verifier]
timeout_sec = 10.0
"""
_PIECE = re.compile(r"<[a-z/]+>|\w+|\s+|.", re.S)


@functools.cache
def tasks() -> tuple[Task, ...]:
    """`sim/fast` and `sim/slow`."""
    return tuple(_task(name) for name in ("fast", "slow"))


def _task(name: str) -> Task:
    files = {
        "instruction.md": f"Do what is {name}.",
        "task.toml": _TOML.format(name=name),
        "environment/Dockerfile": "FROM muster-base\nWORKDIR /work\n",
        "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
    }
    archive = pack_files({path: TaskFile(0o644, text.encode()) for path, text in files.items()})
    return task_from_archive(archive, name=name)


class ToyCodec:
    """ChatCodec of a made-up model: one id for each word, blank or sign."""

    stop_ids: tuple[int, ...] = (0,)

    def __init__(self) -> None:
        self._words: dict[int, str] = {0: "<end>"}

    def render(self, messages: tuple[Message, ...], *, generate: bool) -> str:
        chat = "".join(f"<{m.role}>{m.text}<end>" for m in messages)
        return chat + "<assistant>" if generate else chat

    def encode(self, text: str, *, special: bool) -> list[int]:
        return [self._id(piece, special) for piece in _PIECE.findall(text)]

    def _id(self, piece: str, special: bool) -> int:
        if special and piece == "<end>":
            return 0
        found = 1 + crc32(piece.encode()) % 2_000_000_000
        self._words[found] = piece
        return found

    def decode(self, ids: tuple[int, ...]) -> str:
        return "".join(self._words[id_] for id_ in ids if id_)


CODEC = ToyCodec()


def blocks(ids: Sequence[int], size: int) -> tuple[int, ...]:
    """Chain hashes of the whole blocks of a row: each names all that comes before it too."""
    return tuple(BlockChain(size).extend(Context(pack(ids)), len(ids)))


def fingerprint(ids: tuple[int, ...]) -> bytes:
    """Short name of a row of token ids."""
    return hashlib.blake2b(repr(ids).encode(), digest_size=12).digest()
