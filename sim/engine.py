"""Replicas: tokens from a table of dice, versions that a trainer publishes, and a memory of it all.

Owns: what was truly sampled. Promise: a reply depends on the context, the seed and the version
alone; `sampled` remembers each, so that what is trained on can be held against it. A replica that
starts again serves nothing until it has the newest published version. Does not cover: the real
replica's states (services/inference).
"""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

from muster.errors import Fenced, Unavailable
from muster.types import EpisodeKey, FinishReason, Segment, SegmentKind, VersionSpan
from sim.led import Shared
from sim.models import Model
from sim.net import Respond
from sim.process import Process
from sim.work import CODEC, fingerprint


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
        self.published = 0


class Replica(Process):
    """One inference replica."""

    def __init__(self, shared: Shared, name: str, model: Model, engines: Engines):
        super().__init__(shared.world, name, "inference")
        self.shared, self.model, self.engines = shared, model, engines
        self.version: int | None = 0
        self.owner_epoch = self.trainer_epoch = 0

    def boot(self) -> None:
        self.version = 0 if self.engines.published == 0 else None
        self.owner_epoch = self.trainer_epoch = 0
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
        if self.version is None:
            respond(Unavailable("this replica waits for its weights"))
            return
        first = self.version
        wait = self.world.spread("generate", self.model.generate_s)
        self.soon(wait, lambda: respond(self._reply(context, seed, first)))

    def _reply(self, context: tuple[int, ...], seed: int, first: int) -> Sample | Unavailable:
        last = self.version
        if last is None:
            return Unavailable("this replica waits for its weights")
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
        if self.version == version:
            respond("served")
            return

        def done() -> None:
            if epoch < self.trainer_epoch:
                respond(Fenced("a newer trainer has published"))
                return
            self.version = version
            self.engines.served.add(version)
            self.engines.published = max(self.engines.published, version)
            respond(version)

        self.soon(self.world.spread("publish", self.model.publish_s), done)
