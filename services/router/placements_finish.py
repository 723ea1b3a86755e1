"""Placement by predicted finish: where this turn, those after it, and what they delay, end first.

Owns: the prediction of a conversation's seconds on each replica and when a move pays. Promise:
pure; a conversation leaves its home only for a gain that pays for the work done twice, or free when
its cache is gone there; ties go to the id. Does not cover: seats of a KV budget (seats.py), the
published policies (placements_published.py).

The seconds of a candidate, for this turn: waiting for prefills that were sent before, prefill of
what is not cached there, decode at the batch that the turn makes, what the turn costs the others in
flight (their finish counts as much: a group ends with its last sibling), what an overfull cache
will have to compute again. For the `_TURNS_AHEAD` turns after it, which all go to the same place:
decode among the conversations at home there as far as they decode at a time, and what it costs
them; siblings there will grow as this one does, so each counts twice: a group whose long
conversations all lie on one replica ends with that replica. All times the replica's own slowness;
and the way to the replica (of boxes it is taken that they are as far from one as from the other).
"""

from __future__ import annotations

from services.router.costs import Costs
from services.router.placements_view import Choice, Fleet, ReplicaView, TurnRequest, none, willing
from services.router.rules import RouterRules

_TURNS_AHEAD = 8
_MOVE_GAIN = 1.25  # home must be predicted to take so many times longer …
_MOVE_GAIN_S = 0.5  # … and so much longer


class PredictedFinish:
    """Picks the least predicted seconds; constants from the machine's rules."""

    def __init__(self, costs: Costs, hold_fill: float = 0.97, expected_tokens: int = 256):
        self._costs, self._fill, self._expected = costs, hold_fill, expected_tokens

    @staticmethod
    def of(rules: RouterRules) -> PredictedFinish:
        """That of these rules; an unknown reply is taken for at most 256 tokens."""
        return PredictedFinish(Costs.of(rules), rules.hold_fill, min(256, rules.turn_tokens_max))

    def choose(self, request: TurnRequest, fleet: Fleet) -> Choice:
        """Pick a replica for one turn."""
        able = willing(fleet)
        if not able:
            return none()
        decoding = _decoding(able)
        terms: dict[str, float] = {}
        best: ReplicaView | None = None
        home: ReplicaView | None = None
        least = 0.0
        for replica in able:
            seconds = self.seconds(request, replica, decoding)
            terms[replica.id] = seconds
            if best is None or seconds < least or (seconds == least and replica.id < best.id):
                best, least = replica, seconds
            if replica.id == request.home:
                home = replica
        assert best is not None
        if home is None:
            return Choice(best.id, "rehomed" if request.home else "soonest", terms)
        if home.id == best.id:
            return Choice(home.id, "sticky", terms)
        return self._moved(home, best, terms)

    def _moved(self, home: ReplicaView, best: ReplicaView, terms: dict[str, float]) -> Choice:
        stay, go = terms[home.id], terms[best.id]
        if home.cached_tokens <= best.cached_tokens:
            return Choice(best.id, "nothing_cached_at_home", terms)
        if stay - go > _MOVE_GAIN_S and stay > _MOVE_GAIN * go:
            return Choice(best.id, "moved", terms)
        return Choice(home.id, "sticky", terms)

    def seconds(self, request: TurnRequest, replica: ReplicaView, decoding: float) -> float:
        """Predicted seconds there. `decoding`: share of conversations that decode at a time."""
        costs, context, running = self._costs, request.context_tokens, replica.in_flight
        expected = request.expected_tokens or self._expected
        uncached = context - replica.cached_tokens
        prefill = costs.prefill_s(uncached if uncached > 0 else 0)
        more = costs.decode_request_s + costs.decode_context_s * context  # that it adds to a step
        step = costs.step_s(running, replica.running_tokens) + more
        decode = expected * step
        total = prefill + decode + running * (prefill + expected * more)
        if running and replica.queued_tokens:
            total += self._queue_s(replica, decode)
        total += _TURNS_AHEAD * expected * self._ahead_s(request, replica, decoding, more)
        if replica.credit_tokens > 0:
            total += self._overflow_s(request, replica)
        return total * replica.slow + replica.distance_s

    def _ahead_s(
        self, request: TurnRequest, replica: ReplicaView, decoding: float, more: float
    ) -> float:
        """Of each token in later turns: its own step, and what it adds to those of the others."""
        others, load = replica.sessions, replica.load_tokens
        siblings = replica.group_sessions
        if replica.id == request.home:
            others, siblings = others - 1, siblings - 1
            load -= request.context_tokens
        load += siblings * request.context_tokens
        beside = decoding * (others if others > 0 else 0)
        step = self._costs.step_s(0, 0) + self._costs.decode_request_s * beside
        step += self._costs.decode_context_s * decoding * (load if load > 0 else 0)
        return step + more + beside * more

    def _queue_s(self, replica: ReplicaView, decode: float) -> float:
        """Prefills sent before and not over: a request in flight decodes most of its time."""
        running = replica.in_flight
        each = self._costs.prefill_s(replica.queued_tokens // running)
        return running * each * each / (each + decode)

    def _overflow_s(self, request: TurnRequest, replica: ReplicaView) -> float:
        """What an overfull cache makes its conversations compute again, by the share too much."""
        load = replica.load_tokens
        if replica.id != request.home:
            load += request.context_tokens
        excess = load - self._fill * replica.credit_tokens
        if excess <= 0:
            return 0.0
        return self._costs.prefill_s(request.context_tokens) * excess / load


def _decoding(fleet: Fleet) -> float:
    """Requests in flight for each conversation at home, over the fleet; 1 when there is none."""
    sessions = in_flight = 0
    for replica in fleet:
        sessions += replica.sessions
        in_flight += replica.in_flight
    return min(1.0, (in_flight + 1) / (sessions + 1))
