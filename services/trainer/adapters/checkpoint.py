"""Checkpoints on disk.

Owns: `step-000001/` folders and their meta.json. Promise: a folder with that name is whole and
durable (written under another name, synced, renamed, its parent synced); what was half written or
half deleted is swept at the next start; loading checks every file's size and digest. One process at
a time works here: it holds a lock, and where locks do not reach, one that has been replaced finds
the newer epoch before it changes what others see. The newest `keep` stay (0: all); the others go
when `prune` is called. Going back renames newer ones to
`aside-EPOCH-step-000002`: they are never deleted here.
Does not cover: what the files of the policy mean (model_files.py), when to prune (schedule.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from muster import telemetry
from muster.errors import ConfigError, Fenced, InvalidInput, Refused, Unavailable
from muster.leased import FrozenBatch
from muster.types import Value
from services.trainer.figures import StepReport
from services.trainer.lineage import Lineage
from services.trainer.policy import Stop, Stopped
from services.trainer.ports import VersionRecord

META = "meta.json"
EPOCH = "epoch"  # newest epoch that a trainer has used here
LOCK = ".lock"
RETURNED = "returned"  # the value of start_step that has been done
_NAME = re.compile(r"step-(\d{6,})")
_BLOCK = 8 << 20
_log = telemetry.logger("trainer.checkpoint")


class FileMark(Value, frozen=True):
    """Size in bytes and sha256 of one file."""

    size: int
    sha256: str


class CheckpointMeta(Value, frozen=True):
    """What a checkpoint is: the step, its version and where that came from, and the batches that
    it has and the checkpoint before it had not, in order (the last one is the step's own)."""

    run: str
    step: int
    version: int
    parent: int
    digest: str
    trainer_epoch: int
    lineage: Lineage
    report: StepReport
    batches: tuple[FrozenBatch, ...] = ()
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
        self._epoch = 0  # own; 0 before it is known

    async def hold(self) -> None:
        """Take the folder, until this process ends. Raises Unavailable while another one has it."""
        self._root.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._root / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(handle, 32, 0).decode("ascii", "replace").strip()
            os.close(handle)
            raise Unavailable(
                f"another trainer, process {holder or 'unknown'}, has the checkpoints of this run",
                field="checkpoint",
                value=self._root,
                way_out="end that one, or take another run name",
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
                raise
            _log.warning("%s has no locks (%s): run one trainer only", self._root, error)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode("ascii"), 0)

    def newest(self) -> tuple[Path, CheckpointMeta] | None:
        """The newest checkpoint, checked; None before the first. Sweeps what was left half done.

        Raises InvalidInput when it is damaged: going on from an older one silently would train its
        batches a second time in the eyes of whoever has seen the newer.
        """
        for rest in (*self._root.glob(".writing-*"), *self._root.glob(".deleting-*")):
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

        Raises Refused, and leaves the ones before, when it would lack a required file, Fenced when
        a newer trainer has come meanwhile, and Unavailable, leaving no draft, when the disk fails.
        """
        try:
            return self._save(meta, write, stop)
        except OSError as error:
            self._sweep(meta.trainer_epoch)
            self._check_newest(meta.trainer_epoch)
            raise Unavailable(
                f"the checkpoint of step {meta.step} cannot be written: {error}",
                field="checkpoint",
                value=self._root,
                way_out="make room there; it is tried again for trainer.retry_s",
            ) from error

    def _sweep(self, epoch: int) -> None:
        """What this trainer left half written; another one's draft is not its to delete."""
        for rest in self._root.glob(f".writing-{epoch:06d}-*"):
            shutil.rmtree(rest, ignore_errors=True)

    def _save(self, meta: CheckpointMeta, write: Callable[[str], None], stop: Stop) -> Path:
        self._root.mkdir(parents=True, exist_ok=True)
        self._sweep(meta.trainer_epoch)
        draft = self._root / f".writing-{meta.trainer_epoch:06d}-{meta.step:06d}"
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
        self._check_newest(meta.trainer_epoch)
        if target.exists():  # this save is tried again
            self._delete(target)
        draft.rename(target)
        _sync(self._root)
        return target

    def oldest_kept(self) -> int:
        """Step of the oldest checkpoint that stays; 0 while there are fewer than `keep`."""
        folders = self._folders()
        enough = 0 < self._keep <= len(folders)
        return _step(folders[-self._keep]) if enough else 0

    def prune(self, oldest_kept: int) -> None:
        """Delete the checkpoints of steps below `oldest_kept`. Raises Fenced as `save` does."""
        self._check_newest(self._epoch)
        for folder in self._folders():
            if _step(folder) < oldest_kept:
                self._delete(folder)

    def _delete(self, folder: Path) -> None:
        """Renamed first, durably: a folder with a checkpoint's name is never half there."""
        doomed = self._root / f".deleting-{folder.name}"
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        _sync(self._root)
        shutil.rmtree(doomed)

    def go_back(self, step: int, epoch: int) -> None:
        """Set aside every checkpoint after `step`, once for as long as that stays the setting.

        Only checkpoints within the newest `keep` will do: the bank may have dropped what older
        ones have not seen. 0 is the model that the run began with. Raises ConfigError.
        """
        if self._noted(RETURNED) == str(step):
            return
        folders = self._folders()
        steps = [_step(folder) for folder in folders][-self._keep or None :]
        if not folders or _first_batch(self._read(folders[0])) == 1:
            steps = [0, *steps] if len(folders) < self._keep or not self._keep else steps
        if step not in steps:
            raise ConfigError(
                "there is no such checkpoint to go back to",
                field="trainer.start_step",
                value=step,
                way_out=f"choose one of {', '.join(map(str, steps))}, or take the setting out",
            )
        for folder in reversed(folders):  # newest first: what is left is a beginning of the run
            if _step(folder) > step:
                folder.rename(self._root / f"aside-{epoch:06d}-{folder.name}")
                _sync(self._root)
        self._note(RETURNED, str(step))

    def forget_return(self) -> None:
        """The setting is out: the next one is done again, whatever its value."""
        (self._root / RETURNED).unlink(missing_ok=True)

    def epoch(self) -> int:
        """The newest epoch that left a trace here. A Redis that lost its newest writes may count
        from below it."""
        found = [self._newest_epoch()]
        for folder in self._folders()[-1:]:
            with contextlib.suppress(InvalidInput):  # `newest` says what is wrong with it
                found.append(self._read(folder).trainer_epoch)
        return max(found)

    def note_epoch(self, epoch: int) -> None:
        """Durable before the epoch is used for anything. Raises Fenced for one that is old."""
        self._check_newest(epoch)
        self._note(EPOCH, str(epoch))
        self._epoch = epoch

    def _newest_epoch(self) -> int:
        noted = self._noted(EPOCH)
        return int(noted) if noted.isdecimal() else 0

    def _check_newest(self, epoch: int) -> None:
        newest = self._newest_epoch()
        if newest > epoch:
            raise Fenced(
                "a newer trainer works on the checkpoints of this run",
                field="trainer_epoch",
                value=epoch,
                way_out=f"stop: epoch {newest} is in charge",
            )

    def _noted(self, name: str) -> str:
        path = self._root / name
        return path.read_text("ascii").strip() if path.is_file() else ""

    def _note(self, name: str, text: str) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        draft = self._root / f".{name}"
        draft.write_text(f"{text}\n", "ascii")
        _sync(draft)
        draft.rename(self._root / name)
        _sync(self._root)

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
        if not self._root.is_dir():
            return []
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
            way_out="restore it, or go back to an older one with trainer.start_step",
        )


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _first_batch(meta: CheckpointMeta) -> int:
    """1 when the checkpoint is the run's first, so that nothing before it was ever deleted."""
    return meta.batches[0].step if meta.batches else meta.step


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
