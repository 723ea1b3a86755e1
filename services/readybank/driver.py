"""The bank's machine on real streams.

Owns: reading the streams (from the start, then their tail), writing batches and fates, having done
what is over with, dead letters, handing answers to the calls that wait. Promise: the epoch is taken
before anything is read, so no former bank can write behind this one's back; a write that keeps
failing ends the service, and the next incarnation finds all it needs in the streams. Does not
cover: decisions (machine.py), gRPC (server.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from muster import failpoints, telemetry
from muster.driver import MachineDriver
from muster.errors import InvalidInput, Unavailable
from muster.journal import Journal
from muster.patience import patiently
from muster.streams import Received, RunStreams, StreamEntry, dead_entry
from services.readybank import events as e
from services.readybank.adapters import feed
from services.readybank.adapters.clearing import Clearing
from services.readybank.adapters.freezing import freeze
from services.readybank.adapters.scoring import Scorer
from services.readybank.config import ReadyBankConfig
from services.readybank.machine import BankMachine

T = TypeVar("T")
Answer = e.Answer
_log = telemetry.logger("services.readybank")
_TRACES_MAX = 100_000
_FREEZE = ("readybank.freeze.before", "readybank.freeze.after")
_TOP_UP = ("readybank.top_up.before", "readybank.top_up.after")
# Before groups and labels, so that what they refer to is known.
_FIRST = ("versions", "jobs")
_THEN = ("events", "outcomes")


class Calls:
    """Calls that wait for the machine's answer, by id."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[Answer]] = {}
        self._number = 0

    def open(self, kind: str) -> tuple[str, asyncio.Future[Answer]]:
        self._number += 1
        call = f"{kind}-{self._number}"
        self._waiting[call] = asyncio.get_running_loop().create_future()
        return call, self._waiting[call]

    def close(self, call: str) -> None:
        self._waiting.pop(call, None)

    def answer(self, answer: Answer) -> None:
        """Hand it over; a caller that hung up is none."""
        waiting = self._waiting.get(answer.call)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)


class BankDriver:
    """Runs one BankMachine; `ask` is what the server calls."""

    def __init__(
        self,
        streams: RunStreams,
        config: ReadyBankConfig,
        machine: BankMachine,
        journal: Journal,
        clearing: Clearing,
        scorer: Scorer,
    ):
        self.streams, self._config, self.machine = streams, config, machine
        self._scorer = scorer
        self.calls, self._clearing = Calls(), clearing
        self._driver = MachineDriver[e.BankEvent, e.BankCommand](machine, self._execute, journal)
        self._read: dict[str, str] = {}
        self._traces: dict[str, str] = {}

    async def feed(self, event: e.BankEvent) -> None:
        await self._driver.feed(event)

    async def run(self, stopping: asyncio.Event) -> None:
        """The machine's loop, until `stopping`."""
        await self._driver.run(stopping)

    async def ticks(self) -> None:
        await self._driver.ticks(e.Tick, self._config.tick_s)

    async def recover(self) -> None:
        """Feed all that is durable; `run` must be under way."""
        await self.feed(e.TrainerEpochRestored(await self._retried(self._clearing.trainer_epoch)))
        # Versions and jobs are read after the groups that refer to them, and fed before them.
        found = {stream: await self._all(stream) for stream in (*_THEN, *_FIRST)}
        jobs = {feed.job_of(m) for stream in ("jobs", "events") for m in found[stream]} - {""}
        for event in await self._retried(lambda: self._clearing.restored(sorted(jobs))):
            await self.feed(event)
        for batch in feed.restored_batches(await self._read_all("batches", feed.batch_record)):
            await self.feed(batch)
        for fate in await self._read_all("fates", feed.restored_fate):
            await self.feed(fate)
        for stream in (*_FIRST, *_THEN):
            await self._feed_all(found[stream])
            self._read[stream] = found[stream][-1].id if found[stream] else "0"
        await self.feed(e.RecoveryEnded())

    async def in_charge(self) -> None:
        """Raises Unavailable when a newer bank is: it is found in the registry."""
        if not await self._retried(self._clearing.in_charge):
            raise Unavailable(
                "another ready bank has taken over", way_out="ask for the ready bank's address"
            )

    async def tail(self) -> None:
        """Feed what is appended from now on, for ever."""
        while True:
            page = await self._retried(lambda: self.streams.tail(self._read))
            for stream in (*_FIRST, *_THEN):
                messages = [m for m in page if m.stream == stream]
                await self._feed_all(messages)
                if messages:
                    self._read[stream] = messages[-1].id

    async def _all(self, stream: str) -> list[Received]:
        return await self._retried(lambda: self.streams.read_all(stream))

    async def _read_all(self, stream: str, read: Callable[[Received], T]) -> list[T]:
        found = [await self._readable(m, read) for m in await self._all(stream)]
        return [record for record in found if record is not None]

    async def _feed_all(self, messages: list[Received]) -> None:
        for message in messages:
            event = await self._readable(message, feed.event_of)
            if isinstance(event, e.GroupOpened):
                self._remember(event.group, message.traceparent)
            if event is not None:
                await self.feed(event)

    async def _readable(self, message: Received, read: Callable[[Received], T]) -> T | None:
        """What the message says; None when it cannot be read: then it is a dead letter."""
        try:
            return feed.readable(message, read)
        except InvalidInput as error:
            _log.error("entry left out: %s", error, extra={"stream": message.stream})
            dead = dead_entry(message, str(error))
            await self._retried(lambda: self.streams.append([dead]))
            await self.feed(e.EntryLeftOut(message.stream, message.id))
            return None

    def _remember(self, group: str, traceparent: str) -> None:
        """The trace of an open group, to be linked from its batch; bounded."""
        while len(self._traces) >= _TRACES_MAX:
            self._traces.pop(next(iter(self._traces)))
        self._traces[group] = traceparent

    async def _retried(self, call: Callable[[], Awaitable[T]]) -> T:
        return await patiently(
            "Redis",
            call,
            patience_s=self._config.redis_patience_s,
            field="readybank.redis_patience_s",
        )

    async def _execute(self, command: e.BankCommand) -> e.BankEvent | None:
        if isinstance(command, e.Write):
            return await self._write(command)
        if isinstance(command, e.Clear):
            return await self._clear(command)
        if isinstance(command, e.ScoreGroup):
            return await self._scorer(command)
        if isinstance(command, e.TellStall):
            _log.warning("stalled: %s", command.problem, extra={"refused": self.machine.refused})
            return None
        self.calls.answer(command)
        return None

    async def _write(self, command: e.Write) -> e.BankEvent:
        run = self.streams.run
        if isinstance(command, e.WriteReturned):
            short, *fates = feed.returned_entries(run, command.batch, command.fates)
            await self._retried(lambda: self._return(short, fates))
            gone = " ".join(command.batch.returned)
            _log.info("given back", extra={"step": command.batch.step, "groups": gone})
            return e.BatchReturned(command.batch.step)
        if isinstance(command, e.WriteFrozen):
            entry = feed.frozen_entry(run, command.batch)
            # Many traces lead to one batch: links, not parents.
            links = [self._traces.pop(m.group, "") for m in command.batch.members]
            points = _TOP_UP if command.batch.revision else _FREEZE
            with telemetry.span("FreezeBatch", links=links, step=command.batch.step):
                await self._retried(lambda: self._freeze(entry, *points))
            _log.info("frozen", extra={"step": command.batch.step, "entry": entry.dedupe})
            return e.BatchFrozen(command.batch.step)
        if isinstance(command, e.WriteTrained):
            entries = feed.trained_entries(run, command.batch, command.fates)
            await self._retried(lambda: self._train(entries))
            _log.info("trained", extra={"step": command.batch.step})
            return e.BatchTrained(command.batch.step)
        fate = command.fate
        await self._retried(lambda: self._close(feed.closing_entries(run, command)))
        self._traces.pop(fate.group, None)
        _log.info("%s", fate.fate, extra={"group": fate.group, "reason": fate.reason})
        return e.FateWritten(fate.group)

    async def _freeze(self, entry: StreamEntry, before: str, after: str) -> None:
        await failpoints.at(before)
        await freeze(self.streams, entry)
        await failpoints.at(after)

    async def _return(self, short: StreamEntry, fates: list[StreamEntry]) -> None:
        await failpoints.at("readybank.return.before")
        await freeze(self.streams, short, fates)
        await failpoints.at("readybank.return.after")

    async def _train(self, entries: list[StreamEntry]) -> None:
        await failpoints.at("readybank.train.before")
        await self.streams.append(entries)
        await failpoints.at("readybank.train.after")

    async def _close(self, entries: list[StreamEntry]) -> None:
        await failpoints.at("readybank.filter.before")
        await self.streams.append(entries)
        await failpoints.at("readybank.filter.after")

    async def _clear(self, command: e.Clear) -> e.BankEvent:
        if isinstance(command, e.WriteMark):
            await self._retried(lambda: self._clearing.mark(command))
            return e.MarkWritten(command.step)
        if isinstance(command, e.RetireGroups):
            for over in command.groups:
                await self._retried(partial(self._clearing.retire, over))
                self._traces.pop(over.group, None)
            return e.GroupsRetired(tuple(over.group for over in command.groups))
        await self._retried(lambda: self._clearing.trim(command))
        return e.StreamsTrimmed()
