"""Where an attempt's next reply comes from: asking, waiting, asking again.

Owns: the request of a turn, its retries, the waits for a replica and for room in a KV cache.
Promise: pure; a turn is asked for again only after its former request failed or was aborted, and an
answer to a former request is dropped; a wait for any replica is bounded, a wait for KV is not (the
seats bound it). Does not cover: what a reply leads to (episode.py), the choice (fleet.py).
"""

from __future__ import annotations

from abc import abstractmethod

import msgspec

from muster.outcome import End, Failure
from muster.types import SamplingParams
from services.router import chat
from services.router import events as e
from services.router.attempt import Attempt, Commands, Given, Phase
from services.router.fleet import HELD, Fleet, Placed
from services.router.placements import Mark, TurnRequest


class Sampling(Attempt):
    """An attempt, as far as its replies go."""

    def __init__(self, given: Given):
        super().__init__(given)
        self.sampling = given.sampling
        self.placed = Placed("", "")  # the newest request, once there is one
        self._prompt_tokens = 0  # that its group shares
        self.held_for_kv = False
        self._marks: tuple[Mark, ...] = ()  # of the prompt and its turns, in order
        self._observed = 0  # tokens of the newest message, about
        self._held_since: float | None = None  # since when no replica takes it
        self._full = ""  # the replica that took nothing when it was asked last
        self._held = False  # it had to wait: for a replica, a retry, a router
        self._messages = chat.opening(given.task.instruction)

    @abstractmethod
    def _said(self, event: e.Generated) -> Commands:
        """A reply came: what it leads to."""

    @abstractmethod
    def _stop(self, end: End) -> Commands:
        """The model's own end of the attempt."""

    def opens_with(self, tokens: int, marks: tuple[Mark, ...]) -> None:
        """The prompt that its group shares."""
        self._prompt_tokens, self._marks = tokens, marks

    def _request(self) -> TurnRequest:
        context = self.account.context
        tokens = context + self._observed if context else self._prompt_tokens
        return TurnRequest(self.id, self.key.group, self.replica, tokens, 0, self._marks)

    def _generate(self, fleet: Fleet, now: float) -> Commands:
        account, rules = self.account, self.rules
        room = min(
            rules.turn_tokens_max,
            rules.episode_tokens_max - account.tokens,
            rules.context_tokens_max - account.context,
        )
        placed = fleet.place(self._request(), now, avoid=self._full)
        self.held_for_kv = placed.why == HELD
        if self.held_for_kv:
            self.phase, self._held = Phase.HOLD, True
            self._held_since = self._wake_at = None
            return []
        if not placed.replica:
            return self._hold(now)
        self.phase, self.replica, self._wake_at = Phase.GENERATE, placed.replica, None
        self.placed = placed
        return [
            e.Generate(
                episode=self.key,
                replica=self.replica,
                turn=self.turn,
                retry=self._retry,
                messages=() if self._retry else self._messages,
                max_tokens=max(room, 1),
                context_max=rules.context_tokens_max,
                sampling=self._sampling_of_turn(),
                timeout_s=rules.generate_timeout_s,
                why=placed.why,
                terms=placed.terms,
                cached=placed.cached,
                held=placed.held,
            )
        ]

    def _sampling_of_turn(self) -> SamplingParams:
        """A seed for each turn: an engine starts a request's noise afresh from its seed."""
        seed = mix(self.sampling.seed, self.turn)
        return msgspec.structs.replace(self.sampling, seed=seed)

    def _hold(self, now: float) -> Commands:
        self.phase, self._held = Phase.HOLD, True
        if self._held_since is None:
            self._held_since = now
        self._wake_at = now + self.rules.retry_after_s
        if now - self._held_since > self.rules.hold_max_s:
            why = self._detail or "none is there"
            return self._lose(Failure.ENGINE, f"no replica for {self.rules.hold_max_s:g} s: {why}")
        return []

    def go_on(self, fleet: Fleet, now: float) -> Commands:
        """It was held for KV, and may sample now; or its home is gone."""
        return self._generate(fleet, now) if self.phase is Phase.HOLD else []

    def replica_lost(self, fleet: Fleet, now: float) -> Commands:
        """The replica that has its request hangs or is gone: ask another one for the same turn."""
        if self.phase is not Phase.GENERATE:
            return []
        abort = e.AbortGenerate(self.key, self.replica, self.turn, self._retry)
        self._retry += 1
        self._retries += 1
        self._held = True
        self._detail = f"{self.replica} was lost"
        if self._retries > self.rules.generate_retries_max and fleet.has_replica:
            # It may be this very turn that takes one engine after the other down.
            return [abort, *self._lose(Failure.ENGINE, self._detail)]
        return [abort, *self._generate(fleet, now)]

    def _awaits(self, turn: int, retry: int) -> bool:
        """Whether an answer is one to the present request."""
        return self.phase is Phase.GENERATE and (turn, retry) == (self.turn, self._retry)

    def on_generated(self, event: e.Generated, fleet: Fleet, now: float) -> Commands:
        if not self._awaits(event.turn, event.retry):
            return []
        fleet.replied(self.id, event, now)
        self._retry = self._retries = 0
        self._held_since, self._full, self._detail = None, "", ""
        if event.boundary_tokens:
            self._marks = (*self._marks, (event.boundary, event.boundary_tokens))
        self.account.reply(event.prompt_tokens, event.sampled_tokens)
        self.account.clock(event, held=self._held)
        self._held = False
        return self._said(event)

    def on_generate_failed(self, event: e.GenerateFailed, fleet: Fleet, now: float) -> Commands:
        if not self._awaits(event.turn, event.retry) or event.replica != self.replica:
            return []
        fleet.request_over(self.id)
        self._retry += 1
        self._detail = event.detail
        if event.full:  # nothing has failed: only the time of waiting is bounded
            self._full = event.replica
            return self._hold(now)
        fleet.failed(event.replica, now)
        self._retries, self._held_since = self._retries + 1, None
        if self._retries > self.rules.generate_retries_max and fleet.has_replica:
            return self._lose(Failure.ENGINE, event.detail)
        commands = self._hold(now)
        if self.label is None:  # it does wait
            # A replica that died is listed for some seconds more: the retries must outlast that.
            pause_s = self.rules.retry_after_s * 2 ** (self._retries - 1)
            self._wake_at = now + min(pause_s, self.rules.retry_max_s)
        return commands

    def on_context_full(self, event: e.ContextFull, fleet: Fleet) -> Commands:
        if self.phase is not Phase.GENERATE or event.turn != self.turn:
            return []
        fleet.request_over(self.id)
        return self._stop(End.CONTEXT)

    def _held_until(self, unix_s: float) -> None:
        if self._held:
            self.account.hold(unix_s)
        self._held = False


def mix(seed: int, *parts: int) -> int:
    """A seed for each combination of parts, equal in every replay (Knuth's MMIX constants)."""
    for part in parts:
        seed = (seed * 6364136223846793005 + part + 1442695040888963407) % 2**63
    return seed
