"""The fleet as an episode sees it: where its next turn goes, or why it waits.

Owns: how health, seats, loads and placement come together. Promise: pure; a turn goes only to a
replica that is admitted, and under an admission arm only on its seat; every choice names its reason
and terms; a replica that is lost takes its homes, seats and counts along. Does not cover: the
policies (placements.py), the rules of holding (arms.py), hosts of boxes (hosts.py).
"""

from __future__ import annotations

from msgspec.structs import replace

from muster.types import Value
from services.router import events as e
from services.router.arms import arm_of
from services.router.costs import Costs
from services.router.health import Health
from services.router.hosts import Hosts
from services.router.loads import Loads
from services.router.placements import TurnRequest, placement_of
from services.router.rules import RouterRules
from services.router.seats import Seats

_SHOWN = 4  # replicas of one text
HELD, NO_REPLICA = "held", "no_replica"


class Placed(Value, frozen=True):
    """Where a turn goes; `replica` is empty when it waits, `why` says for what.

    `terms`, `held`: as in Generate; `cached`: tokens thought to be there.
    """

    replica: str
    why: str
    terms: dict[str, float] = {}
    cached: int = 0
    held: dict[str, float] = {}


class Fleet:
    """Replicas and hosts of a run."""

    def __init__(self, rules: RouterRules):
        self._rules, self._costs = rules, Costs.of(rules)
        self.hosts = Hosts()
        self.health = Health(rules)
        self.loads = Loads(rules)
        self._placement = placement_of(rules)
        self._listed: frozenset[str] = frozenset()
        self._starting = True  # some replica may still have to be proven for the first time
        arm = arm_of(rules)
        # Seats choose by themselves; a policy that knows no seats is asked for each turn.
        self._steers = rules.placement == "predicted_finish"
        self.seats: Seats | None = None
        if arm is not None:
            admits = self.health.admits
            self.seats = Seats(rules, arm, admits, self._welcomes, steers=self._steers)

    def _welcomes(self, replica: str, now: float) -> bool:
        """Whether it takes new conversations; a slow one does while no other does."""
        health = self.health
        if not health.admits(replica, now) or health.suspect(replica, now):
            return False
        return not self._slow(replica) or not any(
            health.admits(other, now)
            and not health.suspect(other, now)
            and not self._slow(other)
            and (self.seats is None or load.credit_tokens > 0)
            for other, load in self.loads.loads.items()
        )

    def _slow(self, replica: str) -> bool:
        return self.health.slow(replica) >= self._rules.slow_ratio

    def _unwelcome(self, replica: str, now: float) -> str:
        """For people: why it takes no new conversation; "" when it does."""
        if self._welcomes(replica, now):
            return ""
        if why := self.health.why(replica, now):
            return why
        if self.health.suspect(replica, now):
            return f"{replica} has just failed a call"
        ratio = self.health.slow(replica)
        return f"{replica} is {ratio:.1f} times slower than the median, others come first"

    # -- what is heard of replicas -----------------------------------------------------

    def replicas_are(self, replicas: tuple[e.Replica, ...], now: float) -> tuple[str, ...]:
        """Take the announced ones; answers those whose requests have to move."""
        gone = self.health.listed([r.id for r in replicas], now)
        for replica in gone:
            self._lose(replica)
        # One that is not announced and still has a credit keeps what runs there.
        kept = {a.replica for a in self.loads.asked.values()} | {
            h.replica for h in self.loads.homes.values()
        }
        self._listed, self._starting = frozenset(r.id for r in replicas), True
        self.loads.listed(self._listed | (kept & self.loads.loads.keys()))
        return gone if self._rules.probes else ()

    def heard(self, event: e.ReplicaEvent, version: int, now: float) -> tuple[str, ...]:
        """News of one replica; answers those whose requests have to move."""
        lost: tuple[str, ...] = ()
        match event:
            case e.ReplicaTold():
                if event.ttl_s > self._rules.credit_ttl_max_s:
                    event = replace(event, ttl_s=self._rules.credit_ttl_max_s)
                lost = self.health.told(event, version, now)
                for replica in lost:
                    self._lose(replica)
                self._granted(event, now)
            case e.ReplicaSilent():
                self.health.silent(event, now)
            case e.ReplicaProbed():
                self.health.probed(event, now)
                if self.seats is not None:
                    self.seats.admitted(event.replica)
        return lost + self.lost(now)

    def _granted(self, event: e.ReplicaTold, now: float) -> None:
        replica = event.replica
        if replica not in self.loads.loads:
            return
        tokens = event.credit_tokens if event.serving else 0
        anew, cold = self.loads.told(replica, event.life, event.block_size, event.version)
        load = self.loads.loads[replica]
        load.credit_tokens = tokens
        load.trip(event.trip_s)
        if self.seats is not None:
            self.seats.told(replica, tokens, now + event.ttl_s, anew=anew)
            if cold:
                self.seats.cleared(replica)

    def lost(self, now: float) -> tuple[str, ...]:
        """Replicas that have hung or been silent for too long by now, each named once."""
        lost = self.health.lost(now)
        for replica in lost:
            self._lose(replica)
        return lost

    def _lose(self, replica: str) -> None:
        self.loads.lost(replica)
        if replica not in self._listed:
            self.loads.listed(self.loads.loads.keys() - {replica})
        if self.seats is not None:
            self.seats.lost(replica)

    def published(self, version: int) -> None:
        """New weights empty every cache."""
        for replica in self.loads.published(version):
            if self.seats is not None:
                self.seats.cleared(replica)

    @property
    def has_replica(self) -> bool:
        return bool(self.loads.loads)

    def why_none(self, now: float) -> str:
        """For people: why no replica takes turns; "" when one does."""
        whys = [self._why_not(replica, now) for replica in self.loads.loads]
        return "" if "" in whys else "; ".join(whys[:_SHOWN])

    def _why_not(self, replica: str, now: float) -> str:
        why = self.health.why(replica, now)
        if not why and self.seats is not None and not self.loads.loads[replica].credit_tokens:
            return f"{replica} grants no room in its KV cache"
        return why

    def proving(self, now: float) -> bool:
        """Whether launches wait for the first probes of the fleet."""
        return self.health.starting(now)

    def why_no_room(self, now: float) -> str:
        """For people: why no replica has room for one more conversation; "" when one has."""
        return self.seats.why_no_room(now, self._unwelcome) if self.seats is not None else ""

    def why_held(self, episode: str, now: float) -> tuple[str, str]:
        """For people: what an episode that is held for KV lacks, and who goes first there."""
        if self.seats is None or not self.seats.holds(episode):
            return "", ""
        return self.seats.why_held(episode, now, self.health.why)

    def patient(self, until: float) -> None:
        """Until then, what a former router left waits for the replica that has its KV."""
        if self.seats is not None:
            self.seats.patient_until = until

    def time(self, now: float) -> list[e.ProbeReplica]:
        """Time passed: who is let on for having waited, whom to probe."""
        if self.seats is not None:
            self.seats.every(now)
        return self.health.due(now)

    # -- seats -------------------------------------------------------------------------

    def may_launch(self, now: float) -> bool:
        """Whether any replica has room for one more conversation.

        While replicas are being proven for the first time none is preferred for being the first.
        """
        if self._starting:
            self._starting = self.health.starting(now)
        return not self._starting and self._has_room(now)

    def _has_room(self, now: float) -> bool:
        return self.seats is None or self.seats.has_room(now)

    def launch(self, episode: str, group: str, context_tokens: int, now: float) -> bool:
        """Whether there is room for one more conversation; it has its seat then."""
        context = context_tokens or self._rules.reserve_tokens  # unknown: as a young one may grow
        return self.seats is None or self.seats.launch(episode, group, context, now)

    def seat(self, episode: str) -> tuple[str, dict[str, float]]:
        """The replica of its seat, "" without one, and as in AcquireBox why that."""
        return self.seats.launched(episode) if self.seats is not None else ("", {})

    def adopt(self, request: TurnRequest) -> None:
        """Go on with a conversation that a former router launched."""
        if self.seats is not None:
            context = request.context_tokens or self._rules.reserve_tokens
            self.seats.adopt(request.episode, request.group, context, request.home)

    @property
    def changed(self) -> bool:
        """Whether anything has happened by which somebody held may go on."""
        return self.seats is not None and self.seats.changed

    @property
    def roomy(self) -> bool:
        """Whether anything has happened by which a new conversation may begin."""
        return self.seats is not None and self.seats.roomy

    def settle(self, now: float) -> list[str]:
        """Who was held and goes on."""
        return self.seats.settle(now) if self.seats is not None else []

    # -- turns -------------------------------------------------------------------------

    def place(self, request: TurnRequest, now: float, *, avoid: str = "") -> Placed:
        """Choose a replica for a turn and count it as in flight there.

        `request.home`: where its former turn was sampled, for an episode that is not known here.
        `avoid` is chosen only when there is no other.
        """
        known = self.loads.homes.get(request.episode)
        if known is not None and known.replica != request.home:
            request = replace(request, home=known.replica)
        seats = self.seats
        if seats is None:
            return self._by_policy(request, now, avoid)
        if not seats.seated(request.episode):
            self.adopt(request)
        if self._steers:
            return self._by_seat(seats, request, now, avoid)
        chosen = self._choose(request, now, avoid)
        if not chosen.replica:
            return chosen
        if not seats.granted(request.episode):
            seats.at(request.episode, chosen.replica)
        return self._by_seat(seats, request, now, "")

    def _by_seat(self, seats: Seats, request: TurnRequest, now: float, avoid: str) -> Placed:
        episode = request.episode
        home = seats.home(episode)
        failed = bool(home) and (home == avoid or self.health.suspect(home, now))
        terms: dict[str, float] = {}
        # A home that takes no turn for a moment is no reason to leave what lies in its cache.
        if self._steers and not failed and seats.slack and self.health.admits(home, now):
            wish = self._choose(replace(request, home=home), now, avoid)
            terms = wish.terms
            if wish.replica not in ("", home):
                seats.rather(episode, wish.replica, now)
        context = request.context_tokens or self._rules.reserve_tokens
        replica = seats.ready(episode, context, now, leave=failed)
        if not replica:
            return Placed("", HELD if seats.holds(episode) else NO_REPLICA)
        why = "seat" if replica == request.home else "moved" if request.home else "launched"
        cached = self.loads.sent(request, replica, self._kept(request))
        if not terms:
            terms = {replica: self._costs.prefill_s(request.context_tokens - cached)}
        return Placed(replica, why, terms, cached, seats.hold_over(episode, now))

    def _by_policy(self, request: TurnRequest, now: float, avoid: str) -> Placed:
        placed = self._choose(request, now, avoid)
        if not placed.replica:
            return placed
        cached = self.loads.sent(request, placed.replica)
        return Placed(placed.replica, placed.why, placed.terms, cached)

    def _choose(self, request: TurnRequest, now: float, avoid: str) -> Placed:
        health = self.health

        def suspect(replica: str) -> bool:
            return replica == avoid or health.suspect(replica, now)

        views = self.loads.views(request, suspect, health.slow, self._kept(request))
        if self._rules.probes:
            views = tuple(view for view in views if health.admits(view.id, now))
        choice = self._placement.choose(request, views)
        return Placed(choice.replica, choice.reason if choice.replica else NO_REPLICA, choice.terms)

    def _kept(self, request: TurnRequest) -> int:
        """Tokens at its home that the index cannot know: those of a former router's turns."""
        if request.marks or self.seats is None:
            return 0
        return self.seats.kept(request.episode)

    def replied(self, episode: str, event: e.Generated, now: float) -> None:
        """A reply came."""
        asked = self.loads.ended(episode)
        if asked is None:
            return
        replica = asked.replica
        cold = event.version >= 0 and self.loads.serves(replica, event.version)
        if cold and self.seats is not None:
            self.seats.cleared(replica)
        if not cold:
            self.loads.replied(asked, event)
        if self.seats is not None:
            at = (event.prompt_tokens, event.sampled_tokens, event.cached_tokens)
            self.seats.turn_end(episode, *at, now)
        if self._rules.probes:
            self._timed(replica, event)

    def _timed(self, replica: str, event: e.Generated) -> None:
        """How long it took against what was thought: by that a slow replica is found."""
        load = self.loads.loads.get(replica)
        if load is None:
            return
        costs = self._costs
        step = costs.step_s(load.in_flight + 1, load.running_tokens + event.prompt_tokens)
        prefill = costs.prefill_s(event.prompt_tokens - event.cached_tokens)
        took = event.end_unix_s - event.start_unix_s - event.queue_s
        self.health.answered(replica, prefill + event.sampled_tokens * step, took)

    def request_over(self, episode: str) -> None:
        """Its request ended without a reply."""
        self.loads.ended(episode)

    def failed(self, replica: str, now: float) -> None:
        """It failed a call: prefer others for a while."""
        self.health.failed(replica, now)

    def samples_no_more(self, episode: str) -> tuple[str, ...]:
        """Its KV is free; answers the episodes whose caches had better be touched."""
        self.loads.session_over(episode)
        return self.seats.over(episode) if self.seats is not None else ()

    def session_over(self, episode: str) -> None:
        """Explicit end of a conversation: nothing waits for a time-out."""
        self.loads.ended(episode)
        self.loads.session_over(episode)
        if self.seats is not None:
            self.seats.over(episode)
