"""Follows the streams of the run and tracks its figures, in the trainer's process.

Owns: reading versions, jobs and evaluations, the batch's figures, the trainer's own folder of
tracked rows. Promise: it reads what is durable, never what the trainer has in memory, so a step
that a crash takes away was never tracked, and one that stands is, at the next start if need be;
work on files and records is done beside the event loop; a full disk or an absent Redis is told and
stops no training. Does not cover: rows (muster/tracking.py), files (muster/tracking_files.py).

It lives with the trainer because the trainer alone makes steps, is one at a time and stops after
its last publication; what is written while it is away is in the streams until checkpoints move on.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from google.protobuf.message import DecodeError
from msgspec.structs import replace
from redis.asyncio import Redis

from muster import codec, evaluated_codec, served, telemetry, tracking
from muster.decode import decode
from muster.errors import InvalidInput, MusterError, Unavailable
from muster.evaluation import Training
from muster.report import report
from muster.streams import Received, RunStreams
from muster.tracking import Book, Row
from muster.tracking_files import Tracked, boards
from muster.types import Purpose
from muster.v1 import events_pb2 as ev
from services.trainer.adapters.worker import in_daemon

_FOLLOWED = ("versions", "jobs", "evaluations")
_OF_BATCH = ("jobs", "versions", "batches", "fates", "events", "outcomes")
_AWAY_S = 2.0
_log = telemetry.logger("trainer.tracker")


class Tracker:
    """Of one run."""

    def __init__(
        self,
        redis: Redis,
        run: str,
        folder: Path,
        *,
        tensorboard: bool = True,
        batch_figures: bool = True,
    ):
        """`folder`: of the run's tracked rows. `batch_figures`: also what the streams say of each
        step's batch, which means to read them."""
        self._redis, self._streams, self._run = redis, RunStreams(redis, run), run
        self._folder, self._tensorboard, self._batch = folder, tensorboard, batch_figures
        self._read = dict.fromkeys(_FOLLOWED, "0")
        self._tracked: Tracked | None = None
        self._book = Book()
        self._training = Training()
        self._broken = ""
        self._taking = False  # rows are marked as due and not all of them are written
        self._idle = threading.Event()  # no thread works on the files
        self._idle.set()

    async def run(self) -> None:
        """Until files cannot be written."""
        while not self._broken:
            try:
                await self._take(await self._streams.tail(self._read))
            except Unavailable as error:
                _log.info("the streams cannot be read now: %s", error)
                self._begin()
                await asyncio.sleep(_AWAY_S)

    async def last(self, within_s: float) -> None:
        """What was recorded until now; then the files are closed. What is not written within that
        time is at the next start."""
        with contextlib.suppress(Unavailable, TimeoutError):
            async with asyncio.timeout(within_s):
                if self._taking:  # the stop came between the mark and the file
                    await in_daemon(self._idle.wait, "track-end")
                    self._begin()
                while not self._broken:
                    messages = await self._streams.tail(self._read, block_ms=1)
                    if not messages:
                        break
                    await self._take(messages)
        if self._tracked is not None and self._idle.is_set():  # else a thread writes there still
            self._tracked.close()

    async def _take(self, messages: Sequence[Received]) -> None:
        self._taking = True
        if self._tracked is None and not self._broken:
            await self._on_disk(self._open)
        if self._broken:
            return
        rows = [row for message in messages for row in self._rows(message)]
        whole = [await self._with_batch(row) for row in rows]
        if rows:
            serving = await served.recorded(self._redis, self._run)
            self._training = replace(self._training, serving=serving)
        if self._tracked is not None and whole:
            await self._on_disk(partial(self._write, self._tracked, whole))
        self._read |= {message.stream: message.id for message in messages}
        self._taking = False

    def _open(self) -> None:
        sinks = boards(self._folder) if self._tensorboard else []
        self._tracked = Tracked(self._folder, sinks)
        self._begin()

    def _begin(self) -> None:
        """Read all again: what was due and is not written is due once more."""
        self._read = dict.fromkeys(_FOLLOWED, "0")
        self._book = Book(self._tracked.rows if self._tracked else ())

    def _write(self, tracked: Tracked, rows: Sequence[Row]) -> None:
        tracked.write(rows)
        tracked.served(self._training)

    async def _on_disk(self, work: Callable[[], None]) -> None:
        """The thread goes on when its waiter is cancelled: `_idle` says when it has ended."""
        self._idle.clear()
        await in_daemon(partial(self._worked, work), "track")

    def _worked(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (OSError, InvalidInput) as error:
            self._broken, self._tracked = str(error), None
            _log.error("nothing is tracked any more until the trainer's next start: %s", error)
        finally:
            self._idle.set()

    def _rows(self, message: Received) -> list[Row]:
        try:
            if message.stream == "versions":
                return self._book.version(ev.PolicyVersionRecord.FromString(message.data))
            if message.stream == "jobs":
                return self._job(ev.JobRecord.FromString(message.data))
            found = evaluated_codec.from_pb(ev.EvaluatedGroup.FromString(message.data))
            return self._book.group(found)
        except (DecodeError, InvalidInput) as error:
            _log.error("%s of %s is not tracked: %s", message.id, message.stream, error)
            return []

    def _job(self, record: ev.JobRecord) -> list[Row]:
        if codec.purpose_from_pb(record.purpose) is Purpose.TRAIN and not record.cancelled:
            sampling = codec.sampling_from_pb(record.sampling)
            self._training = replace(self._training, job=record.job, sampling=sampling)
        return self._book.job(record)

    async def _with_batch(self, row: Row) -> Row:
        """A step's row with what the streams say of its batch, while they say it."""
        if row.kind != "step" or not self._batch:
            return row
        messages: list[Received] = []
        for stream in _OF_BATCH:
            messages += await self._streams.read_all(stream)
        try:
            figures = await in_daemon(partial(_batch_of, self._run, messages, row.step), "report")
        except MusterError as error:
            _log.info("nothing more is known of the batch of step %d: %s", row.step, error)
            return row
        return replace(row, figures=row.figures | figures)


def _batch_of(run: str, messages: Sequence[Received], step: int) -> tracking.Figures:
    found = report(decode(run, messages), only=step)
    return tracking.batch(found.batches[0])
