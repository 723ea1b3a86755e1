"""Replicas: tokens from a table of dice, versions that a trainer publishes, and a memory of it all.

Owns: what was truly sampled. Promise: a reply depends on the context, the seed and the version
alone; `sampled` remembers each, so that what is trained on can be held against it. A replica that
starts again has the newest durable version, and serves it when it is the published one; else it
waits for the trainer. Does not cover: the real replica's states (services/inference).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from muster.errors import Fenced, MusterError, Unavailable
from muster.types import EpisodeKey, FinishReason, Segment, SegmentKind, VersionSpan
from muster.v1 import events_pb2 as ev
from sim.led import Shared
from sim.models import Model
from sim.net import Respond, Serve
from sim.process import Process
from sim.streams import Store
from sim.work import CODEC, fingerprint

_NOT_SERVING = Unavailable("this replica waits for its weights", field="replica.state")


@dataclass(frozen=True)
class Sample:
    """One reply."""

    text: str
    segment: Segment
    context: int
    finish: FinishReason = FinishReason.STOP


class Engines:
    """What every replica ever sampled: (context, ids) → the segment as the engine told it."""

    def __init__(self) -> None:
        self.sampled: dict[tuple[bytes, tuple[int, ...]], list[Segment]] = {}
        self.served: set[int] = {0}
        self.on_disk: Callable[[int], bool] = lambda version: True  # there is a checkpoint of it
        self.stale: Callable[[str], None] = lambda problem: None  # hears of replies of old weights

    def newest(self, store: Store, stage: ev.VersionStage.ValueType) -> int | None:
        """The newest version of a stage that the records name; a durable one must be there."""
        records = (ev.PolicyVersionRecord.FromString(m.data) for m in store.after("versions", "-"))
        found = [r.version for r in records if r.stage == stage]
        if stage == ev.VERSION_STAGE_DURABLE:
            found = [version for version in found if self.on_disk(version)]
        return max(found, default=None)


class Replica(Process):
    """One inference replica."""

    def __init__(self, shared: Shared, name: str, model: Model, engines: Engines):
        super().__init__(shared.world, name, "inference")
        self.shared, self.model, self.engines = shared, model, engines
        self.version, self.serves, self._sent = 0, False, False
        self.owner_epoch = self.trainer_epoch = 0

    def boot(self) -> None:
        """As services/inference/__main__.py: the newest durable version that is there; then what
        the others serve."""
        self.version, self.serves, self._sent = 0, False, False
        self.owner_epoch = self.trainer_epoch = 0
        self._least = self.engines.newest(self.shared.store, ev.VERSION_STAGE_PUBLISHED)

        def loaded(found: Any) -> None:
            self.version = found or 0
            self._ask(ev.VERSION_STAGE_PUBLISHED, self._started)

        self._ask(ev.VERSION_STAGE_DURABLE, loaded)

    def _ask(self, stage: ev.VersionStage.ValueType, hear: Callable[[Any], None]) -> None:
        """The newest version of a stage, None before the first; again while the store is away."""

        def heard(found: Any) -> None:
            if isinstance(found, MusterError):
                self.soon(0.5, lambda: self._ask(stage, hear))
            else:
                hear(found)

        shared = self.shared
        serve: Serve = lambda respond: respond(self.engines.newest(shared.store, stage))  # noqa: E731
        shared.net.call(self, shared.server, "versions", serve, heard, 5.0)

    def _started(self, published: int | None) -> None:
        self.serves = published in (None, self.version)
        self.shared.announce(self)

    def claim(self, epoch: int, respond: Respond) -> None:
        """A router makes its epoch known."""
        if epoch < self.owner_epoch:
            respond(Fenced("a newer owner epoch has spoken"))
            return
        self.owner_epoch = epoch
        respond(True)

    def generate(
        self, key: EpisodeKey, context: tuple[int, ...], seed: int, respond: Respond
    ) -> None:
        if key.owner_epoch < self.owner_epoch:
            respond(Fenced("a newer owner epoch has spoken"))
            return
        self.owner_epoch = key.owner_epoch
        if not self.serves:
            respond(_NOT_SERVING)
            return
        first = self.version
        wait = self.world.spread("generate", self.model.generate_s)
        began = self.world.now

        def reply() -> None:
            # However long this replica was stopped meanwhile: its own clock tells it so.
            self.shared.truth.acted[key.id] += self.world.now - began
            respond(self._reply(context, seed, first))

        self.soon(wait, reply)

    def _reply(self, context: tuple[int, ...], seed: int, first: int) -> Sample:
        last = self.version
        if not self._sent and self._least not in (None, last):
            self.engines.stale(f"{self.name} began with {last}, and {self._least} was published")
        dice = crc32(f"{seed}/{last}".encode(), crc32(fingerprint(context)))
        text = self._text(dice)
        ids = (*CODEC.encode(text, special=False), 0)
        half = len(ids) // 2
        spans: tuple[VersionSpan, ...] = (VersionSpan(last, 0, len(ids), last),)
        if last != first and half:
            spans = (
                VersionSpan(first, 0, half, first),
                VersionSpan(last, half, len(ids), first),
            )
        logprobs = tuple(-((dice >> n % 16) % 7) / 8.0 for n in range(len(ids)))
        segment = Segment(SegmentKind.MODEL, ids, logprobs, spans)
        self.engines.sampled.setdefault((fingerprint(context), ids), []).append(segment)
        return Sample(text, segment, len(context))

    def _text(self, dice: int) -> str:
        model, share = self.model, dice % 10_007 / 10_007
        if model.fast_s:
            return "```bash\nwork\n```"
        if share < model.done:
            return "DONE"
        if share < model.done + model.silly:
            return "well"
        if share < model.done + model.silly + model.dates:
            return f"```bash\ndate {dice % 5}\n```"
        return f"```bash\nwork {dice % 97}\n```"

    def publish(self, epoch: int, version: int, respond: Respond) -> None:
        """By the newest trainer; older ones are refused."""
        if epoch < self.trainer_epoch:
            respond(Fenced("a newer trainer has published"))
            return
        self.trainer_epoch = epoch
        if self.version == version and self.serves:
            respond("served")
            return

        def done() -> None:
            if epoch < self.trainer_epoch:
                respond(Fenced("a newer trainer has published"))
                return
            self.version, self.serves, self._sent = version, True, True
            self.engines.served.add(version)
            respond(version)

        self.soon(self.world.spread("publish", self.model.publish_s), done)
