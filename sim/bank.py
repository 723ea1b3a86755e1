"""The real BankMachine, fed and written as services/readybank/driver.py does, as one of two.

Owns: the shell: reading the streams, appends under the bank's epoch, calls that wait. Promise: the
messages are the real ones (services/readybank/adapters), so what is lost in writing and reading
is lost here too. Does not cover: decisions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from muster import codec
from muster.errors import Fenced, Refused, Unavailable
from muster.leased import FrozenBatch
from muster.streams import Received
from muster.types import EpisodeKey
from muster.v1 import events_pb2 as ev
from muster.v1 import readybank_pb2 as rb
from services.readybank import events as e
from services.readybank import explain
from services.readybank.adapters import feed
from services.readybank.adapters.freezing import freeze
from services.readybank.machine import BankMachine
from sim.led import Led, Shared
from sim.models import Model
from sim.net import Respond
from sim.retire import Retirer
from sim.streams import RUN, Effect, ModelStreams, at_once

FIRST = ("versions", "jobs")
THEN = ("events", "outcomes")


class Bank(Led):
    """One process; `machine` is there while it leads."""

    def __init__(self, shared: Shared, name: str, model: Model, machine: type[BankMachine]):
        super().__init__(shared, name, "readybank")
        self.model, self._make = model, machine
        self.machine: BankMachine | None = None
        self.serves = False  # it has read what there is
        self._calls: dict[str, Respond] = {}
        self.stalls: list[tuple[float, str]] = []

    def died(self) -> None:
        self.machine, self.serves = None, False
        self.epoch = 0
        self._calls = {}

    def lead(self) -> None:
        rules = e.BankRules(
            repairs_max=self.model.repairs_max,
            stall_s=30.0,
            kl_sure=self.model.kl_sure,
            kl_refuse=self.model.kl_refuse,
            calibrate_share=0.5,
            score_wait_s=3.0,
        )
        self._calls = {}
        self._number = 0
        self._read: dict[str, str] = {}
        self.machine = self._make(rules)
        self.streams = ModelStreams(self.store, role="readybank", epoch=self.epoch)
        self.retirer = Retirer(self, self.streams)
        self.stubbornly(self._recover(), lambda _: self._recovered(), "recover")

    async def _recover(self) -> None:
        """BankDriver.recover: each read is a call of its own."""
        newest = await Effect("get", lambda: self.store.epoch("trainer"))
        self.feed(e.TrainerEpochRestored(newest))
        found = {stream: await self.streams.read_all(stream) for stream in (*THEN, *FIRST)}
        jobs = {feed.job_of(m) for stream in ("jobs", "events") for m in found[stream]} - {""}
        for event in await self.retirer.clearing.restored(sorted(jobs)):
            self.feed(event)
        records = [feed.batch_record(m) for m in await self.streams.read_all("batches")]
        for batch in feed.restored_batches(records):
            self.feed(batch)
        for message in await self.streams.read_all("fates"):
            self.feed(feed.restored_fate(message))
        for stream in (*FIRST, *THEN):
            self._take_in(found[stream])
            self._read.setdefault(stream, "0")
        self.feed(e.RecoveryEnded())

    def _recovered(self) -> None:
        self.serves = True
        self.shared.announce(self)
        self._tail()
        self.every(1.0, lambda: self.feed(e.Tick()))

    def _take_in(self, messages: list[Received]) -> None:
        for message in messages:
            self._read[message.stream] = message.id
            event = feed.event_of(message)
            if event is not None:
                self.feed(event)

    def _tail(self) -> None:
        positions = dict(self._read)

        def heard(found: Any) -> None:
            if found is None:
                page = at_once(self.streams.tail(self._read))
                for stream in (*FIRST, *THEN):
                    self._take_in([m for m in page if m.stream == stream])
                self._tail()
            else:
                self.soon(0.5, self._tail)

        self.news(positions, heard)

    def told(self) -> str:
        """What it says it waits for."""
        return "" if self.machine is None else explain.waits_for(self.machine)

    def feed(self, event: e.BankEvent) -> None:
        if self.machine is None:
            return
        commands = self.machine.handle(event, self.world.now)
        self.world.record(self.name, event, commands)
        for command in commands:
            self._execute(command)

    # what clients ask

    def ask(
        self, kind: str, event: Callable[[str], e.BankEvent], respond: Respond, deadline_s: float
    ) -> None:
        """What the gRPC server does; after its deadline nobody listens any more."""
        if not self.serves:
            respond(Unavailable("this bank stands by"))
            return
        self._number += 1
        call = f"{kind}-{self._number}"
        self._calls[call] = respond

        def gone() -> None:
            if self._calls.pop(call, None) is not None:
                self.feed(e.LeaseGone(call))

        self.soon(deadline_s, gone)
        self.feed(event(call))

    def _answer(self, command: Any) -> None:
        respond = self._calls.pop(getattr(command, "call", ""), None)
        if respond is None:
            return

        def checked(found: Any) -> None:
            if found is not True:
                respond(Unavailable("another ready bank has taken over"))
            elif isinstance(command, e.RefuseCall):
                kind = Fenced if command.fenced else Refused
                respond(kind(command.problem, field=command.field, value=command.value))
            elif isinstance(command, e.SendBatch):
                self._send(command, respond)
            else:
                respond(command)

        # A bank that slept may know less than is true.
        self.slowly(self.retirer.clearing.in_charge(), checked, "in_charge")

    def _send(self, command: e.SendBatch, respond: Respond) -> None:
        """Reads the payloads, as the server does while it streams."""

        def read() -> list[rb.LeaseBatchResponse]:
            header = feed.batch_to_pb(RUN, command.batch, ev.BATCH_STAGE_FROZEN)
            parts = [rb.LeaseBatchResponse(header=header, returns_left=command.returns_left)]
            for group in command.groups:
                parts += [_part(self.streams, group, sibling) for sibling in group.siblings]
            return parts

        self.at_store("payloads", read, lambda found: respond((command, found)))

    # writes

    def _execute(self, command: e.BankCommand) -> None:
        if isinstance(command, e.WriteFrozen):
            work = partial(freeze, self.streams, feed.frozen_entry(RUN, command.batch))  # type: ignore[arg-type]
            frozen = e.BatchFrozen(command.batch.step)
            self.patiently_slowly(work, lambda _: self.feed(frozen), "WriteFrozen")
        elif isinstance(command, e.WriteReturned):
            short, *fates = feed.returned_entries(RUN, command.batch, command.fates)
            work = partial(freeze, self.streams, short, fates)  # type: ignore[arg-type]
            returned = e.BatchReturned(command.batch.step)
            self.patiently_slowly(work, lambda _: self.feed(returned), "WriteReturned")
        elif isinstance(command, e.WriteTrained):
            entries = feed.trained_entries(RUN, command.batch, command.fates)
            self._write("WriteTrained", entries, e.BatchTrained(command.batch.step))
        elif isinstance(command, e.WriteFate):
            done = e.FateWritten(command.fate.group)
            self._write("WriteFate", feed.closing_entries(RUN, command), done)
        elif isinstance(command, e.ScoreGroup):
            found = self._scored(command)
            self.soon(self.world.spread("score", self.model.score_s), lambda: self.feed(found))
        elif isinstance(command, e.TellStall):
            self.stalls.append((self.world.now, command.problem))
        elif not self.retirer.execute(command):
            self._answer(command)

    def _scored(self, command: e.ScoreGroup) -> e.BankEvent:
        """By chance: nobody, or some figure."""
        chance = self.world.rng("score")
        if chance.random() < 0.3:
            return e.ScoreMissed(command.group, "no replica is idle")
        worst, version = 2 * self.model.kl_sure, command.version
        scores = (
            e.Score(s.sibling, s.attempt, version, 1, chance.uniform(0.0, worst))
            for s in command.siblings
        )
        return e.GroupScored(command.group, tuple(scores))

    def _write(self, op: str, entries: list[Any], event: e.BankEvent) -> None:
        work = partial(self.streams.append, entries)
        self.patiently_slowly(work, lambda _: self.feed(event), op)


def _part(
    streams: ModelStreams, group: e.LeasedGroup, sibling: e.LeasedSibling
) -> rb.LeaseBatchResponse:
    """One sibling, as services/readybank/adapters/payloads.py sends it."""
    key = EpisodeKey(RUN, group.group, sibling.sibling, sibling.attempt, 0)
    part = rb.LeaseBatchResponse(
        trajectory=rb.LeasedTrajectory(
            group=group.group,
            task=group.task,
            sibling=sibling.sibling,
            attempt=sibling.attempt,
            label=codec.label_to_pb(key, sibling.label),
            sampling=codec.sampling_to_pb(group.sampling),
        )
    )
    for name, data in zip(
        sibling.payload_keys, at_once(streams.payloads(sibling.payload_keys)), strict=True
    ):
        if data is None:
            raise Refused("the tokens of a turn are gone", field="payload_key", value=name)
        part.trajectory.turns.add(key=name, payload=data)
    return part


def as_brought(batch: FrozenBatch) -> e.Batch:
    """A checkpoint's batch, as its trainer brings it."""
    members = tuple(e.BatchMember(m.group, m.attempts) for m in batch.members)
    return e.Batch(
        step=batch.step,
        members=members,
        asked_unix_s=batch.asked_unix_s,
        complete_unix_s=batch.complete_unix_s,
        trainer_epoch=batch.trainer_epoch,
        policy_version=batch.policy_version,
        revision=batch.revision,
        returned=batch.returned,
        groups=batch.groups,
    )
