"""One attempt as the models see it: its plan, its tokens, its box; the names of its requests.

Owns: the carrier that the actors share, and marks, which stand for chain hashes. Promise: two
contexts have the same mark only where they have the same tokens. Does not cover: what happens to it
(router_actor.py).
"""

from __future__ import annotations

from random import Random

from muster.types import EpisodeKey
from services.router import events as e
from sim.rollout.chain import Chain
from sim.rollout.workload import Plan, Regime


class Talk:
    """One attempt: its plan, its tokens so far, its box."""

    __slots__ = (
        "acted",
        "boxes",
        "chain",
        "index",
        "lives_until",
        "number",
        "plan",
        "replays_alike",
        "replica",
        "reply",
        "sampled",
        "starts",
        "submitted_at",
    )

    def __init__(self, index: int, number: int, plan: Plan, chain: Chain):
        self.index, self.number, self.plan, self.chain = index, number, plan, chain
        self.acted = 0  # turns whose observation is in the context
        self.reply = self.sampled = 0  # tokens of the running request; of all that are over
        self.replica = ""
        self.submitted_at = 0.0
        self.starts = 0  # of boxes, asked for so far
        self.boxes = 0  # had so far
        self.replays_alike = True  # commands that run again in the present box print the same
        self.lives_until = float("inf")  # the present box, in simulated seconds

    def chances(self, seed: int, attempt: int) -> Random:
        """Of a box that the plan does not know: it takes the place of a lost one."""
        return Random(f"{seed}/{self.index}/{self.number}/{attempt}/{self.starts}")


def name_of(request: e.Generate | e.AbortGenerate) -> str:
    """Of a request, in its engine."""
    return f"{request.episode.id}/{request.turn}/{request.retry}"


def mark(talk: Talk, key: EpisodeKey, turn: int) -> int:
    """Stands for the chain hash of a context at the end of a turn: no other context has it."""
    return (((talk.index + 1) * 64 + talk.number) * 16 + key.attempt) * 4096 + turn + (1 << 40)


def prompt_marks(regime: Regime, group: int, block: int) -> tuple[int, ...]:
    """For each whole block of a group's prompt: those of the system's part are everybody's."""
    common, whole = regime.system_tokens // block, regime.prompt_tokens // block
    own = ((group + 1) << 20) - common
    return (*range(1, common + 1), *(own + n for n in range(common, whole)))
