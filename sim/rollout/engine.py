"""A modelled inference engine: one queue, one paged KV cache, steps that decode and prefill.

Owns: when a request starts, how long it takes and what it finds cached. Promise: exact event times
(many equal steps are taken at once, with the same outcome as one by one); equal calls give equal
answers. A step is *mixed*, as vLLM's: every decoding request samples a token, and what is left of
`chunk_tokens` goes to prefill, in queue order; it lasts the decode step (none if nothing decodes)
plus the growth of each prefill's cost P(uncached) by its chunk, so that chunks cost what the whole
does and the engine's busy time is Σ P + Σ decode steps. A step that ends a prefill samples its
first token. New requests, aborts, clears, pauses and a new speed wait for the end of the step in
progress.

A request starts when its whole prompt fits beside what the running ones hold; the head of the line
waits for that, and the line behind it. A running one that finds no block for its next token makes
the newest give way (lowest priority first), to the front of the line; it computes again what it no
longer finds cached. Does not cover: who is sent here and when.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from muster.errors import InvalidInput
from sim.rollout.batch import Batch
from sim.rollout.chain import Chain
from sim.rollout.costs import EngineCosts
from sim.rollout.kv import PrefixCache
from sim.rollout.requests import Done, Line, Request, check
from sim.rollout.stretch import Stretch

__all__ = ["Done", "EngineModel"]


class EngineModel:
    """One replica. `submit` and the others may come at any `now` that does not go back; call
    `advance` at `next_at()`.

    Figures: busy_s, engine time of steps that are over; kv_tokens, in all; prefilled_tokens;
    recomputed_tokens, see Done, at the start; sampled_tokens of stretches that ended; preemptions.
    """

    def __init__(
        self,
        *,
        kv_tokens: int,
        block: int = 16,
        costs: EngineCosts | None = None,
        running_max: int = 1024,
        chunk_tokens: int = 2048,
    ):
        if not 0 < running_max < chunk_tokens:
            raise InvalidInput(
                "a step must have room for more than the decoding requests",
                field="chunk_tokens",
                value=chunk_tokens,
                way_out=f"more than running_max = {running_max}",
            )
        self.costs = costs or EngineCosts()
        self.running_max, self.chunk_tokens = running_max, chunk_tokens
        self.busy_s, self.steps, self.preemptions = 0.0, 0, 0
        self.prefilled_tokens = self.recomputed_tokens = self.sampled_tokens = 0
        self._speed, self._seq, self._kv = 1.0, 0, kv_tokens
        self._reset(0.0, block)

    def _reset(self, now: float, block: int) -> None:
        self.cache = PrefixCache(self._kv, block)
        self._batch = Batch(block)
        self._live: dict[str, Request] = {}
        self._line = Line()
        self._ends: list[tuple[int, int, Request]] = []  # decoding: (last step, arrival, …)
        self._partial: Request | None = None  # its prefill takes more than the present steps
        self._ending: list[Request] = []  # their prefill ends with the present step
        self._aborting: list[Request] = []
        self._clearing = False
        self._done: list[Done] = []
        self._seen, self._stretch = now, Stretch(now)
        self._paused_until = float("-inf")

    @property
    def speed(self) -> float:
        """1.0 is normal, 0.5 takes twice as long; a new one holds from the next step on."""
        return self._speed

    @speed.setter
    def speed(self, value: float) -> None:
        self._speed = value
        self._stretch.cut(self._seen)

    @property
    def running(self) -> int:
        """Requests that hold KV."""
        return self._batch.size + len(self._ending) + (self._partial is not None)

    @property
    def waiting(self) -> int:
        """Requests that wait to start."""
        return len(self._live) - self.running

    @property
    def running_tokens(self) -> int:
        """Contexts of the running requests, as of the last boundary."""
        more = sum(request.tokens for request in self._ending)
        return self._batch.context + more + (self._partial.tokens if self._partial else 0)

    @property
    def kv_used_tokens(self) -> int:
        """KV that running requests hold, as of the last boundary."""
        return self.cache.used * self.cache.block

    @property
    def kv_tokens(self) -> int:
        return self.cache.total * self.cache.block

    def sampled_by(self, now: float) -> int:
        """Tokens sampled up to `now`, at most up to `next_at`; exact to the step."""
        return self.sampled_tokens + self._batch.size * self._stretch.whole(now)

    def steps_by(self, now: float) -> int:
        """Steps that are over at `now`, at most at `next_at`."""
        return self.steps + self._stretch.whole(now)

    def submit(
        self, id: str, chain: Chain, sampled: int, now: float, priority: float = 0.0
    ) -> None:
        """Sample that many tokens after the chain, which the caller extends when it is done.

        The smaller priority goes first, as in vLLM; equal ones in order of arrival. InvalidInput
        when its context can never fit.
        """
        self._submit(id, chain, sampled, now, priority)

    def touch(self, chain: Chain, now: float, priority: float = 0.0) -> None:
        """A request for one token whose end is not told: its cache becomes the newest."""
        self._submit(f"touch {self._seq}", chain, 1, now, priority).quiet = True

    def _submit(
        self, name: str, chain: Chain, sampled: int, now: float, priority: float
    ) -> Request:
        if name in self._live:
            raise InvalidInput("this id is live", field="id", value=name, way_out="use a new one")
        check(chain, sampled, self.kv_tokens)
        self._catch_up(now)
        request = Request(name, chain, sampled, now, (priority, self._seq))
        self._seq += 1
        self._live[name] = request
        self._line.join(request)
        stretch = self._stretch
        if stretch.end is None:
            stretch.at = now
            self._begin()
        elif not stretch.share and self._line.head is request:
            stretch.cut(now)
        return request

    def abort(self, id: str, now: float) -> bool:
        """End it without a Done; its KV is idle from the end of the step on. False: unknown."""
        self._catch_up(now)
        request = self._live.get(id)
        if request is None or request.gone:
            return False
        request.gone = True
        if request.hold is None:
            del self._live[id]
            if self._line.head is request:
                self._line.tidy()
                self._stretch.cut(now)
            return True
        self._aborting.append(request)
        self._stretch.cut(now)
        if not self._stretch.steps:
            self._end_aborted()
        return True

    def clear(self, now: float) -> None:
        """Other weights: nothing cached is found any more, running requests prefill again."""
        self._catch_up(now)
        if self._stretch.steps:
            self._clearing = True
            self._stretch.cut(now)
        else:
            self._clear()

    def pause(self, until: float) -> None:
        """No step begins before `until`; the one in progress ends."""
        self._paused_until = max(self._paused_until, until)
        self._stretch.cut(self._seen)

    def kill(self) -> list[str]:
        """All is lost at once, in order of arrival: the ids. It may serve again, empty."""
        lost = [r.id for r in self._live.values() if not r.quiet and not r.gone]
        for request in self._holding():
            self._let_go(request)  # its chain keeps in mind what was computed
        self._reset(self._seen, self.cache.block)
        return lost

    def next_at(self) -> float | None:
        """When to call `advance` again; None while nothing is going on."""
        return self._seen if self._done else self._stretch.end

    def advance(self, now: float) -> list[Done]:
        """Live up to `now`; what was finished by then, in order."""
        stretch = self._stretch
        while stretch.end is not None and stretch.end <= now:
            self._boundary()
        if now > self._seen:
            self._seen = now
        done = self._done
        if done:
            self._done = []
        return done

    def _catch_up(self, now: float) -> None:
        stretch = self._stretch
        while stretch.end is not None and stretch.end < now:
            self._boundary()
        if now > self._seen:
            self._seen = now

    def _boundary(self) -> None:
        """A stretch is over: settle it, let go who is ready, begin the next."""
        stretch, batch, ends = self._stretch, self._batch, self._ends
        assert stretch.end is not None
        if stretch.steps:
            self.busy_s += stretch.end - stretch.at
            self.steps += stretch.steps
            self.sampled_tokens += batch.size * stretch.steps
            blocks = batch.advance(stretch.steps)
            if blocks:
                self.cache.reserve(blocks)
            if self._partial is not None and stretch.share:
                self._partial.progress(stretch.share * stretch.steps)
                self.prefilled_tokens += stretch.share * stretch.steps
        stretch.at = stretch.end
        if self._ending:
            self._sample_first()
        while ends and ends[0][0] <= batch.step:
            self._finish(heappop(ends)[2])
        if self._aborting:
            self._end_aborted()
        if self._clearing:
            self._clear()
        self._begin()

    def _sample_first(self) -> None:
        for request in self._ending:
            self.sampled_tokens += 1
            request.made += 1
            if request.first_at < 0:
                request.first_at = self._stretch.at
            left = request.sampled - request.made
            if left:
                request.origin = self._batch.join(request.tokens + 1)
                heappush(self._ends, (self._batch.step + left, request.order[1], request))
            else:
                self._finish(request)
        self._ending.clear()

    def _finish(self, request: Request) -> None:
        """In its turn, also when it was aborted in its last step: then nobody is told."""
        self._let_go(request)
        del self._live[request.id]
        if request.gone:
            self._aborting.remove(request)
        elif not request.quiet:
            self._done.append(request.done(self._stretch.at))

    def _let_go(self, request: Request) -> None:
        """Out of the batch, its KV idle."""
        hold = request.hold
        assert hold is not None
        if request.origin is not None:
            # The KV of the token sampled last was not computed.
            computed = self._batch.leave(request.origin) - 1
            request.made = computed + 1 - request.chain.tokens
            request.origin = None
            self.cache.assign(hold, computed)
        else:
            computed = hold.cached_tokens + request.prefilled
        self.cache.fill(hold, computed)
        self.cache.release(hold)
        request.hold = None
        if computed > request.chain.computed:
            request.chain.computed = computed

    def _holding(self) -> list[Request]:
        return [request for request in self._live.values() if request.hold is not None]

    def _end_aborted(self) -> None:
        for request in self._aborting:
            if request is self._partial:
                self._partial = None
            self._let_go(request)
            del self._live[request.id]
        self._aborting.clear()
        self._keep_decoding()

    def _clear(self) -> None:
        self._clearing = False
        for request in self._holding():
            self._preempt(request)
        self.cache.clear()

    def _preempt(self, request: Request) -> None:
        """Back to the line, with what it sampled as a part of its prompt."""
        if request is self._partial:
            self._partial = None
        self._let_go(request)
        request.tokens = request.chain.tokens + request.made
        request.preemptions += 1
        self.preemptions += 1
        self._line.join(request)
        self._keep_decoding()

    def _keep_decoding(self) -> None:
        self._ends = [entry for entry in self._ends if entry[2].origin is not None]
        heapify(self._ends)

    def _begin(self) -> None:
        """Plan the next stretch."""
        if self._paused_until > self._stretch.at:
            self._stretch.rest(self._paused_until if self._live else None)
            return
        yielded = self._pay()
        room = self.chunk_tokens - self._batch.size
        partial, extra = self._partial, 0.0
        if partial is not None:
            steps = (partial.todo - 1) // room
            if steps:  # all room is taken, nobody can start
                self._run(steps, room, partial.prefilled)
                return
            room -= partial.todo
            extra += self._last_chunk(partial)
            self._partial = None
        if not yielded:
            extra += self._start(room)
        if self._ending or self._partial is not None:
            if self._batch.size:
                extra += self.costs.step_s(self._batch.size, self._batch.context)
            self._stretch.begin(1, extra / self._speed, 0.0)
        elif self._ends:
            # What gave way may have made room for the head of the line: it tries at the next step.
            self._run(1 if yielded else self._ends[0][0] - self._batch.step)
        else:
            self._stretch.rest()

    def _pay(self) -> bool:
        """Blocks for the next decode step; True when a request had to give way for them."""
        batch, cache = self._batch, self.cache
        if not batch.size or batch.paid > batch.step:
            return False
        taken, yielded = 0, False
        while (need := batch.crossings(batch.step, 1) - taken) > cache.free:
            # Request by request: what is free is taken before the newest gives way.
            taken += cache.free
            cache.reserve(cache.free)
            self._preempt(max(self._holding(), key=lambda r: r.order))
            yielded = True
        if need:
            cache.reserve(need)
        batch.paid = batch.step + 1
        return yielded

    def _start(self, room: int) -> float:
        """Let in who fits, in order; the cost of their first chunks, seconds."""
        extra, line = 0.0, self._line
        while room > 0 and (request := line.head) and self.running < self.running_max:
            hold = self.cache.admit(request.chain, request.tokens)
            if hold is None:
                break
            line.pop()
            self.recomputed_tokens += request.started(hold, self._stretch.at)
            extra += self.costs.prefill_base_s
            if request.todo <= room:
                room -= request.todo
                extra += self._last_chunk(request)
            else:
                extra += self.costs.growth_s(0, room)
                request.progress(room)
                self.prefilled_tokens += room
                self._partial = request
                room = 0
        return extra

    def _last_chunk(self, request: Request) -> float:
        """What is left of its prompt goes into the next step; the cost, seconds."""
        assert request.hold is not None
        tokens = request.todo
        extra = self.costs.growth_s(request.prefilled, tokens)
        request.progress(tokens)
        self.prefilled_tokens += tokens
        self.cache.fill(request.hold, request.tokens)
        self._ending.append(request)
        return extra

    def _run(self, steps: int, share: int = 0, prefilled: int = 0) -> None:
        """At most so many equal steps: until a request ends or there is no block for one."""
        batch = self._batch
        if batch.size:
            steps = batch.steps_within(self.cache.free, min(steps, self._ends[0][0] - batch.step))
        linear, square = self.costs.steps_s(batch.size, batch.context, share, prefilled)
        self._stretch.begin(steps, linear / self._speed, square / self._speed, share)
