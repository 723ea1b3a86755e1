"""Checkpoints on disk.

Owns: `step-000001/` folders and their meta.json. Promise: a folder with that name is whole and
durable (written under another name, synced, renamed, its parent synced); what was half written is
swept at the next start; loading checks every file's size and digest. The newest `keep` stay.
Does not cover: what the files of the policy mean (model_files.py).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from muster.errors import InvalidInput, Refused
from muster.types import Value
from services.trainer.batch import FrozenBatch
from services.trainer.figures import StepReport
from services.trainer.lineage import Lineage
from services.trainer.policy import Stop, Stopped
from services.trainer.ports import VersionRecord

META = "meta.json"
_NAME = re.compile(r"step-(\d{6,})")
_BLOCK = 8 << 20


class FileMark(Value, frozen=True):
    """Size in bytes and sha256 of one file."""

    size: int
    sha256: str


class CheckpointMeta(Value, frozen=True):
    """What a checkpoint is: the step, its batch, its version and where that came from."""

    run: str
    step: int
    version: int
    parent: int
    digest: str
    trainer_epoch: int
    lineage: Lineage
    report: StepReport
    batch: FrozenBatch | None = None
    files: dict[str, FileMark] = {}

    def record(self, folder: Path) -> VersionRecord:
        """Its entry in the versions stream."""
        return VersionRecord(
            self.version, self.parent, self.digest, str(folder), report=self.report
        )


class CheckpointStore:
    """The checkpoints of one run, under `root`. `required`: files that each must have."""

    def __init__(self, root: Path, run: str, keep: int, required: Collection[str] = ()):
        self._root, self._run, self._keep, self._required = root, run, keep, required

    def newest(self) -> tuple[Path, CheckpointMeta] | None:
        """The newest checkpoint, checked; None before the first. Sweeps what was half written.

        Raises InvalidInput when it is damaged: going on from an older one silently would train its
        batches a second time in the eyes of whoever has seen the newer.
        """
        if not self._root.is_dir():
            return None
        for rest in self._root.glob(".writing-*"):
            shutil.rmtree(rest)
        folders = self._folders()
        if not folders:
            return None
        meta = self._read(folders[-1])
        for name, mark in meta.files.items():
            path = folders[-1] / name
            if (
                not path.is_file()
                or path.stat().st_size != mark.size
                or _sha256(path) != mark.sha256
            ):
                raise self._damaged(folders[-1], f"{name} is not what was written")
        return folders[-1], meta

    def save(self, meta: CheckpointMeta, write: Callable[[str], None], stop: Stop) -> Path:
        """Make a checkpoint: `write` fills the folder. Returns its path once it is durable.

        Raises Refused, and leaves the ones before, when it would lack a required file.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        draft = self._root / f".writing-{meta.step:06d}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        write(str(draft))
        self._check_required(draft)
        files: dict[str, FileMark] = {}
        for path in sorted(draft.rglob("*")):
            if stop():
                raise Stopped
            _sync(path)
            if path.is_dir():
                continue
            files[str(path.relative_to(draft))] = FileMark(path.stat().st_size, _sha256(path))
        text = msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(meta, files=files)))
        (draft / META).write_bytes(text + b"\n")
        _sync(draft / META)
        _sync(draft)
        target = self._root / f"step-{meta.step:06d}"
        if target.exists():  # of a branch that was gone back from
            shutil.rmtree(target)
        draft.rename(target)
        _sync(self._root)
        for old in self._folders()[: -self._keep]:
            shutil.rmtree(old)
        return target

    def _check_required(self, draft: Path) -> None:
        missing = [name for name in sorted(self._required) if not (draft / name).is_file()]
        if missing:
            raise Refused(
                "the new checkpoint would not load as a model, so it was not finished: it lacks "
                + ", ".join(missing),
                field="checkpoint",
                value=draft,
                way_out="restart the trainer with the model folder that the run began with",
            )

    def _folders(self) -> list[Path]:
        found = [(_NAME.fullmatch(path.name), path) for path in self._root.iterdir()]
        return [path for _, path in sorted((int(m[1]), path) for m, path in found if m)]

    def _read(self, folder: Path) -> CheckpointMeta:
        try:
            meta = msgspec.json.decode((folder / META).read_bytes(), type=CheckpointMeta)
        except (OSError, msgspec.DecodeError) as error:
            raise self._damaged(folder, f"{META} cannot be read ({error})") from error
        if meta.run != self._run:
            raise self._damaged(folder, f"it belongs to run {meta.run!r}")
        return meta

    @staticmethod
    def _damaged(folder: Path, problem: str) -> InvalidInput:
        return InvalidInput(
            f"this checkpoint cannot be used: {problem}",
            field="checkpoint",
            value=folder,
            way_out="restore it, or delete the folder to go back to the one before",
        )


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
