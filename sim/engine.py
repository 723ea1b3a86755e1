"""Inference replicas of the world: seeded words, a crude KV cache, credits, probes.

Owns: what a replica answers, when, under which version; what it was asked to forget; the ways in
which an engine goes wrong (hangs, is slow, comes back old or with other blocks, lies about its
room, answers though it was told to stop). Promise: a reply depends on the context, the seed, the
version, the replica and the retry, so no two requests are mistaken for one another; `sampled` is
what truly came out. Does not cover: the cost of a turn (sim/rollout), the real replica's states
(services/inference).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

from muster.errors import Fenced, MusterError, Unavailable
from muster.types import EpisodeKey, FinishReason, Segment, SegmentKind, Value, VersionSpan
from muster.v1 import events_pb2 as ev
from sim.led import Shared
from sim.models import Model
from sim.net import Respond, Serve
from sim.process import Process
from sim.streams import Store
from sim.work import CODEC, blocks, fingerprint

_NOT_SERVING = Unavailable("this replica waits for its weights", field="replica.state")
ABORTED = Unavailable("the replica aborted the request")
STEPS_PER_S = 20.0
SLOWER = 10.0
TTL_S = 5.0
Request = tuple[str, int, int]  # episode id, turn, retry


@dataclass(frozen=True)
class Sample:
    """One reply; `cached` tokens of its context were in the cache."""

    text: str
    segment: Segment
    context: int
    finish: FinishReason = FinishReason.STOP
    cached: int = 0
    decode_s: float = 0.0


class Grant(Value, frozen=True):
    """The answer to GrantKv."""

    life: str
    version: int
    serving: bool
    credit_tokens: int
    ttl_s: float
    block_size: int
    running: int
    steps: int


class Engines:
    """What every replica ever sampled: (context, ids) → the segment as the engine told it."""

    def __init__(self) -> None:
        self.sampled: dict[tuple[bytes, tuple[int, ...]], list[Segment]] = {}
        self.by_request: dict[Request, list[Segment]] = {}
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


class Cache:
    """Whole blocks of former contexts, the least recently used dropped first."""

    def __init__(self, tokens: int, block: int):
        self.block = block
        self._most = max(tokens // block, 1)
        self._known: OrderedDict[int, None] = OrderedDict()

    def seen(self, context: tuple[int, ...]) -> int:
        """Tokens of the longest prefix that is here; the last token is always computed."""
        found = 0
        for number, mark in enumerate(blocks(context[:-1], self.block), start=1):
            if mark not in self._known:
                break
            found = number * self.block
        return found

    def keep(self, context: tuple[int, ...]) -> None:
        for mark in reversed(blocks(context, self.block)):
            self._known[mark] = None
            self._known.move_to_end(mark)
        while len(self._known) > self._most:
            self._known.popitem(last=False)


@dataclass
class _Running:
    """A request under way."""

    request: Request
    began: float
    reply: Callable[[], None]
    respond: Respond
    due: bool = False  # it would have ended, and the engine hangs


class Replica(Process):
    """One inference replica."""

    def __init__(self, shared: Shared, name: str, model: Model, engines: Engines):
        super().__init__(shared.world, name, "inference")
        self.shared, self.model, self.engines = shared, model, engines
        self.version, self.serves, self._sent = 0, False, False
        self.owner_epoch = self.trainer_epoch = self._heard_of = 0
        self.block_size = 16
        self.on_served: Callable[[Replica, int], None] = lambda replica, epoch: None
        self.wedged = self.deaf = False
        self.slower = self.lie = 1.0
        self._comes_old = self._is_old = False
        self._running: dict[int, _Running] = {}
        self._asked = 0

    def boot(self) -> None:
        """As services/inference/__main__.py: the newest durable version that is there; then what
        the others serve."""
        self.version, self.serves, self._sent = 0, False, False
        self.owner_epoch = self.trainer_epoch = self._heard_of = 0
        self._least = self.engines.newest(self.shared.store, ev.VERSION_STAGE_PUBLISHED)
        self._cache = Cache(self.model.kv_tokens, self.block_size)
        self._is_old, self._comes_old = self._comes_old, False

        def loaded(found: Any) -> None:
            self.version = found or 0
            self._ask(ev.VERSION_STAGE_PUBLISHED, self._started)

        self._ask(ev.VERSION_STAGE_DURABLE, loaded)

    def died(self) -> None:
        self._running = {}
        self.wedged = self.deaf = False
        self._steps, self._steps_at = 0.0, self.world.now

    @property
    def life_id(self) -> str:
        """Of its process, as it tells it."""
        return f"{self.name}.{self.life}"

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
        self._steps, self._steps_at = 0.0, self.world.now
        if self._is_old and published:
            self.version = published - 1
            self.serves = True
        else:
            self.serves = published in (None, self.version)
        self.shared.announce(self)

    # what a router asks

    def claim(self, epoch: int, respond: Respond) -> None:
        """A router makes its epoch known."""
        if epoch < self.owner_epoch:
            respond(Fenced("a newer owner epoch has spoken"))
            return
        self.owner_epoch = epoch
        respond(True)

    def grant(self, epoch: int, respond: Respond) -> None:
        """Room for the owner's conversations, and how it fares."""
        if epoch < self.owner_epoch:
            respond(Fenced("a newer owner epoch has spoken"))
            return
        self._count()
        credit = int(self.model.kv_tokens * self.lie) if self.serves else 0
        respond(
            Grant(
                *(self.life_id, self.version, self.serves, credit, TTL_S, self.block_size),
                running=len(self._running),
                steps=int(self._steps),
            )
        )

    def probe(self, respond: Respond) -> None:
        """A short request like any other."""
        if not self.serves:
            respond(_NOT_SERVING)
            return
        self._start(("probe", 0, 0), 0.2, lambda: respond(self.life_id), respond)

    def abort(self, request: Request, respond: Respond) -> None:
        """Its caller wants it no more; a deaf engine answers it all the same."""
        found = [n for n, r in self._running.items() if r.request == request and not self.deaf]
        for number in found:
            self._count()
            self._running.pop(number).respond(ABORTED)
        respond(bool(found))

    def touch(self, context: tuple[int, ...], respond: Respond) -> None:
        """Keep this context among the newest; nothing of it is sampled for anybody."""
        if self.serves:
            self._cache.keep(context)
        respond(self.serves)

    def generate(
        self,
        key: EpisodeKey,
        at: tuple[int, int],
        context: tuple[int, ...],
        seed: int,
        respond: Respond,
    ) -> None:
        """`at`: turn and retry."""
        if key.owner_epoch < self.owner_epoch:
            respond(Fenced("a newer owner epoch has spoken"))
            return
        self._heard_of = max(self._heard_of, self.owner_epoch, key.owner_epoch)
        self.owner_epoch = key.owner_epoch
        if not self.serves:
            respond(_NOT_SERVING)
            return
        if key.owner_epoch < self._heard_of:
            self.engines.stale(f"{self.name} samples for the former owner {key.owner_epoch}")
        first, began = self.version, self.world.now
        cached = self._cache.seen(context)
        self._cache.keep(context)
        request = (key.id, *at)

        def reply() -> None:
            # However long this replica was stopped meanwhile: its own clock tells it so.
            took = self.world.now - began
            self.shared.truth.acted[key.id] += took
            found = replace(self._reply(request, context, seed, first, cached), decode_s=took)
            self._cache.keep((*context, *found.segment.token_ids))
            respond(found)

        self._start(request, self.model.generate_s, reply, respond)

    def _start(
        self, request: Request, mean_s: float, reply: Callable[[], None], respond: Respond
    ) -> None:
        self._count()
        self._asked += 1
        number, wait = self._asked, self.world.spread("generate", mean_s) * self.slower
        self._running[number] = _Running(request, self.world.now, reply, respond)
        self.soon(wait, lambda: self._over(number))

    def _over(self, number: int) -> None:
        running = self._running.get(number)
        if running is None:
            return
        if self.wedged:
            running.due = True
            return
        self._count()
        del self._running[number]
        running.reply()

    def _count(self) -> None:
        """Steps of its engine up to now."""
        if self._running and not self.wedged:
            self._steps += STEPS_PER_S * (self.world.now - self._steps_at)
        self._steps_at = self.world.now

    def _reply(
        self, request: Request, context: tuple[int, ...], seed: int, first: int, cached: int
    ) -> Sample:
        last = self.version
        # A version that is published while it begins is as right as the one from before.
        older = self._least is not None and last < self._least
        if not self._sent and not self._is_old and older:
            self.engines.stale(f"{self.name} began with {last}, and {self._least} was published")
        told = f"{seed}/{last}/{self.name}/{request[2]}"
        dice = crc32(told.encode(), crc32(fingerprint(context)))
        text = self._text(dice)
        ids = (*CODEC.encode(text, special=False), 0)
        half = len(ids) // 2
        spans: tuple[VersionSpan, ...] = (VersionSpan(last, 0, len(ids), last),)
        if last != first and half:
            low = min(first, last)
            spans = (
                VersionSpan(first, 0, half, first),
                VersionSpan(last, half, len(ids), low),
            )
        logprobs = tuple(-((dice >> n % 16) % 7) / 8.0 for n in range(len(ids)))
        segment = Segment(SegmentKind.MODEL, ids, logprobs, spans)
        self.engines.sampled.setdefault((fingerprint(context), ids), []).append(segment)
        self.engines.by_request.setdefault(request, []).append(segment)
        return Sample(text, segment, len(context), cached=cached)

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
            self._cache = Cache(self.model.kv_tokens, self.block_size)
            self.engines.served.add(version)
            self.on_served(self, epoch)
            respond(version)

        self.soon(self.world.spread("publish", self.model.publish_s), done)

    # faults

    def wedge(self, for_s: float, *, deaf: bool) -> None:
        """Its engine hangs. `deaf`: it goes on after `for_s` and answers all, also what was given
        up; otherwise its supervisor kills it then."""
        self._count()
        self.wedged, self.deaf = True, deaf
        life = self.life
        self.world.after(for_s, lambda: self.unwedge() if life == self.life else None)

    def unwedge(self) -> None:
        """The end of it."""
        if not self.wedged:
            return
        if not self.deaf:
            self.kill(0.5)
            return
        self._count()
        self.wedged = False
        for number in [n for n, r in self._running.items() if r.due]:
            self.soon(0.0, lambda n=number: self._over(n))  # type: ignore[misc]
        self.soon(0.1, self._hears)

    def _hears(self) -> None:
        self.deaf = False

    def slow(self, for_s: float) -> None:
        """Everything takes ten times as long."""
        self.slower, life = SLOWER, self.life
        self.world.after(for_s, lambda: self.well() if life == self.life else None)

    def tell_lies(self, factor: float, for_s: float) -> None:
        """Grant that many times what there is."""
        self.lie = factor
        self.world.after(for_s, self.well)

    def well(self) -> None:
        """Neither slow nor a liar."""
        self.slower = self.lie = 1.0

    def come_back_old(self, down_s: float) -> bool:
        """Die, and begin with the weights before the newest published; False before there are."""
        if not self.up or not self.engines.newest(self.shared.store, ev.VERSION_STAGE_PUBLISHED):
            return False
        self._comes_old = True
        self.kill(down_s)
        return True

    def come_back_other(self, down_s: float) -> bool:
        """Die, and begin with blocks of another size."""
        if not self.up:
            return False
        self.block_size = 48 - self.block_size  # 16 or 32
        self.kill(down_s)
        return True
