"""A slow engine: one step after the other, request by request, on the block-by-block cache.

What sim/rollout/engine.py must equal. Owns: the rules of its docstring, spelt out without any
arithmetic that takes steps together. Does not cover: aborts, pauses and changes of speed within a
step that is taken (they wait for its end, as there).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from sim.rollout.chain import Chain
from sim.rollout.costs import EngineCosts
from sim.rollout.engine import Done
from tests.property.kv_oracle import DumbCache, DumbHold


class DumbRequest:
    def __init__(self, name: str, chain: Chain, sampled: int, now: float, order: tuple[float, int]):
        self.id, self.chain, self.sampled, self.submitted, self.order = (
            name,
            chain,
            sampled,
            now,
            order,
        )
        self.made = 0
        self.computed = 0  # tokens in the KV
        self.begun = 0  # of them found at this start
        self.decodes = False
        self.hold: DumbHold | None = None
        self.started = self.first = -1.0
        self.cached = self.recomputed = self.preemptions = 0

    @property
    def context(self) -> int:
        return self.chain.tokens + self.made


class DumbEngine:
    def __init__(self, *, kv_tokens: int, block: int, running_max: int, chunk_tokens: int):
        self.cache, self.costs = DumbCache(kv_tokens, block), EngineCosts()
        self.running_max, self.chunk_tokens = running_max, chunk_tokens
        self.running: list[DumbRequest] = []
        self.waiting: list[DumbRequest] = []
        self.done: list[Done] = []
        self.now = 0.0
        self.speed = 1.0
        self.paused = 0.0
        self.calls: list[tuple[float, Callable[[], None]]] = []
        self.aborts: dict[str, float] = {}
        self.seq = 0

    def submit(self, id: str, chain: Chain, sampled: int, now: float, priority: float) -> None:
        request = DumbRequest(id, chain, sampled, now, (priority, self.seq))
        self.seq += 1
        self.calls.append((now, lambda: self.waiting.append(request)))

    def abort(self, id: str, now: float) -> None:
        def act() -> None:
            for request in [r for r in self.running if r.id == id]:
                self.release(request)
                self.running.remove(request)
            self.waiting = [r for r in self.waiting if r.id != id]

        self.calls.append((now, act))
        self.aborts[id] = now

    def clear(self, now: float) -> None:
        def act() -> None:
            for request in list(self.running):
                self.preempt(request)
            self.cache.clear()

        self.calls.append((now, act))

    def pause(self, now: float, until: float) -> None:
        def act() -> None:
            self.paused = max(self.paused, until)

        self.calls.append((now, act))

    def slow(self, now: float, speed: float) -> None:
        def act() -> None:
            self.speed = speed

        self.calls.append((now, act))

    def live(self) -> None:
        """Until all is done."""
        while self.calls or self.running or self.waiting:
            if not self.running and not self.waiting and self.calls:
                self.now = max(self.now, self.calls[0][0])
            while self.calls and self.calls[0][0] <= self.now:
                self.calls.pop(0)[1]()
            if self.now < self.paused and (self.running or self.waiting):
                # Calls during a pause act at once.
                later = [at for at, _ in self.calls if at < self.paused]
                self.now = min([self.paused, *later])
            elif self.running or self.waiting:
                self.step()

    def step(self) -> None:
        yielded = self.give_blocks()
        decoding = [r for r in self.running if r.decodes]
        room = self.chunk_tokens - len(decoding)
        seconds = 0.0
        if decoding:
            seconds += self.costs.step_s(len(decoding), sum(r.context for r in decoding))
        prefilled = [r for r in self.running if not r.decodes]
        for request in prefilled:
            room, more = self.prefill(request, room)
            seconds += more
        self.waiting.sort(key=lambda r: r.order)
        while not yielded and self.waiting and room and len(self.running) < self.running_max:
            request = self.waiting[0]
            hold = self.cache.admit(request.chain, request.context)
            if hold is None:
                break
            self.waiting.pop(0)
            self.running.append(request)
            prefilled.append(request)
            self.admitted(request, hold)
            room, more = self.prefill(request, room)
            seconds += self.costs.prefill_base_s + more
        self.now += seconds / self.speed
        self.end_step(prefilled, decoding)

    def end_step(self, prefilled: list[DumbRequest], decoding: list[DumbRequest]) -> None:
        for request in prefilled:
            if request.computed == request.context:
                request.made += 1
                request.decodes = True
                if request.first < 0:
                    request.first = self.now
        for request in decoding:
            request.computed += 1
            request.made += 1
        # Those whose prefill ends come first, then in order of arrival.
        for request in [*prefilled, *sorted(decoding, key=lambda r: r.order[1])]:
            if request.made == request.sampled:
                self.finish(request)

    def give_blocks(self) -> bool:
        yielded = False
        for request in list(self.running):
            if not request.decodes or request not in self.running:
                continue
            assert request.hold is not None
            while not self.cache.grow(request.hold, request.context):
                victim = max(self.running, key=lambda r: r.order)
                self.preempt(victim)
                yielded = True
                if victim is request:
                    break
        return yielded

    def prefill(self, request: DumbRequest, room: int) -> tuple[int, float]:
        take = min(room, request.context - request.computed)
        before = request.computed - request.begun
        request.computed += take
        assert request.hold is not None
        self.cache.fill(request.hold, request.computed)
        cost = self.costs.prefill_s(before + take) - self.costs.prefill_s(before)
        return room - take, cost

    def admitted(self, request: DumbRequest, hold: DumbHold) -> None:
        request.hold = hold
        request.computed = request.begun = hold.cached_tokens
        if request.started < 0:
            request.started, request.cached = self.now, hold.cached_tokens
        known = min(request.chain.computed, request.context)
        request.recomputed += max(0, known - hold.cached_tokens)

    def release(self, request: DumbRequest) -> None:
        assert request.hold is not None
        self.cache.fill(request.hold, request.computed)
        self.cache.release(request.hold)
        request.hold, request.decodes = None, False
        request.chain.computed = max(request.chain.computed, request.computed)

    def preempt(self, request: DumbRequest) -> None:
        self.release(request)
        self.running.remove(request)
        self.waiting.append(request)
        request.preemptions += 1

    def finish(self, request: DumbRequest) -> None:
        self.release(request)
        self.running.remove(request)
        if self.aborts.get(request.id, math.inf) < self.now:
            return  # within its last step: not told
        self.done.append(
            Done(
                request.id,
                self.now,
                request.cached,
                request.started - request.submitted,
                request.first - request.started,
                self.now - request.first,
                request.recomputed,
                request.preemptions,
            )
        )
