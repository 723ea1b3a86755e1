"""Seats on a few replicas, driven by hand."""

from __future__ import annotations

from services.router.arms import arm_of
from services.router.rules import RouterRules
from services.router.seats import Seats

KV = 1000  # of each replica; 970 may be filled at a boundary
FAR = 1e9


class Hall:
    """Seats on some replicas, each of which grants KV tokens; every reply has 0 tokens."""

    def __init__(self, *replicas: str, reserve: int = 100, **rules: object):
        given: dict = {
            "admission": "kv_fit",
            "reserve_tokens": reserve,
            "keepalive_tokens": 200,
        } | rules
        self.rules = RouterRules(run="r", owner_epoch=1, **given)
        self.closed: set[str] = set()
        self.strange: set[str] = set()
        self.now = 0.0
        arm = arm_of(self.rules)
        assert arm is not None
        self.seats = Seats(
            self.rules,
            arm,
            lambda r, _: r not in self.closed,
            lambda r, _: r not in self.closed | self.strange,
            steers=True,
        )
        for replica in replicas:
            self.grant(replica)

    def grant(self, replica: str, tokens: int = KV, until: float = FAR, *, anew: bool = False):
        self.seats.told(replica, tokens, until, anew=anew)

    def begin(self, id_: str, context: int = 10) -> str:
        """Launch it, and let its box be there; its home when it generates."""
        assert self.seats.launch(id_, id_[0], context, self.now), f"no room for {id_}"
        return self.seats.ready(id_, context, self.now)

    def reply(self, id_: str, tokens: int, cached: int | None = None) -> None:
        """Its turn ended with so many tokens in all."""
        found = self.seats.kept(id_) if cached is None else cached
        self.seats.turn_end(id_, tokens, 0, found, self.now)

    def turn(self, id_: str, tokens: int) -> str:
        """Its turn ended, then its tool; its home when it generates again."""
        self.reply(id_, tokens)
        return self.seats.ready(id_, tokens, self.now)

    def fill(self, **contexts: int) -> None:
        """Conversations of these sizes, all generating, launched in this order."""
        for id_ in contexts:
            self.begin(id_)
        for id_, context in contexts.items():
            assert self.turn(id_, context), f"{id_} does not fit"
        self.settled()

    def settled(self) -> list[str]:
        found: list[str] = []
        while self.seats.changed:
            found += self.seats.settle(self.now)
        return found
