"""A world whose replicas grant credits, and whose replies come when they are given."""

from __future__ import annotations

from muster.types import Waiting
from services.router import events as e
from tests.unit.router.test_machine import silent
from tests.unit.router.world import BLOCK, World, generated, job

KV = 1000


def told(replica: str = "r0", **fields: object) -> e.ReplicaTold:
    given: dict = {
        "life": "first",
        "version": 0,
        "serving": True,
        "credit_tokens": KV,
        "ttl_s": 30.0,
        "block_size": 16,
    } | fields
    return e.ReplicaTold(replica, **given)


class Fleet(World):
    """Replicas that are asked for their credit; replies come when they are given."""

    def __init__(self, replicas: int = 1, **rules: object):
        given: dict = {
            "placement": "predicted_finish",
            "admission": "kv_fit",
            "probes": True,
            "reserve_tokens": 100,
            "prefix_block_tokens": 16,
            "turns_max": 9,
            "context_tokens_max": 100_000,
            "episode_tokens_max": 100_000,
            "keepalive_tokens": 200,
            "retry_after_s": 0.5,
        } | rules
        super().__init__(**given)
        self.on(e.Generate, silent)
        self.start(replicas=replicas)
        self.feed(*(told(f"r{n}") for n in range(replicas)))

    def asked(self, sibling: int) -> list[e.Generate]:
        return [c for c in self.sent(e.Generate) if c.episode.sibling == sibling]

    def reply(self, sibling: int, tokens: int, text: str = BLOCK, **fields: object) -> None:
        """The newest request of this sibling is answered: its context has so many tokens now."""
        newest = self.asked(sibling)[-1]
        given = {"prompt_tokens": tokens, "sampled_tokens": 0, "cached_tokens": tokens} | fields
        self.feed(generated(newest, text, **given))

    def turns(self, sibling: int) -> int:
        """Turns that it was asked for, so far."""
        return len({c.turn for c in self.asked(sibling)})

    def said(self, subject: str) -> list[Waiting]:
        return self.machine.explain(subject, self.now, self.now, "logs")


def held() -> Fleet:
    """Sibling 0 generates with 600 tokens; sibling 1 has 400 at its boundary."""
    world = Fleet().feed(job(size=2, max_turns=9))
    world.reply(0, 600)
    world.reply(1, 400)
    return world
