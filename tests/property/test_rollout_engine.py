"""Random requests on the engine that takes steps together and on the one that takes them one by
one: the same ends at the same times, the same tokens found cached."""

from __future__ import annotations

import math
from random import Random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from sim.rollout.chain import Chain
from sim.rollout.engine import Done, EngineModel
from tests.property.engine_oracle import DumbEngine

Call = tuple[float, str, str, int, int, float]


def chains(draw: Random, block: int) -> list[Chain]:
    made = []
    for number in range(8):
        chain = Chain.shared(("system", 3 * block - 1), (f"group {number % 3}", block + 2))
        chain.extend(draw.randrange(12 * block))
        made.append(chain)
    return made


def calls(draw: Random, span: float) -> list[Call]:
    """(when, what, id, chain, sampled, priority or factor), in order of time."""
    made: list[Call] = []
    for number in range(draw.randrange(1, 40)):
        at = draw.random() * span
        priority = draw.choice((0.0, 0.0, -1.0))
        row = (at, "submit", f"r{number}", draw.randrange(8), draw.randrange(1, 30), priority)
        made.append(row)
        if draw.random() < 0.15:
            made.append((at + draw.random(), "abort", f"r{number}", 0, 0, 0.0))
        if draw.random() < 0.05:
            made.append((draw.random() * span, "clear", "", 0, 0, 0.0))
        if draw.random() < 0.05:
            made.append((draw.random() * span, "pause", "", 0, 0, draw.random()))
        if draw.random() < 0.05:
            made.append((draw.random() * span, "speed", "", 0, 0, 0.3 + draw.random()))
    return sorted(made)


def lived(engine: EngineModel, made: list[Chain], todo: list[Call]) -> list[Done]:
    done: list[Done] = []
    for at, what, name, chain, sampled, value in todo:
        done += until(engine, at)
        if what == "submit":
            engine.submit(name, made[chain], sampled, at, value)
        elif what == "abort":
            engine.abort(name, at)
        elif what == "clear":
            engine.clear(at)
        elif what == "pause":
            engine.pause(at + value)
        else:
            engine.speed = value
    return done + until(engine, math.inf)


def until(engine: EngineModel, now: float) -> list[Done]:
    done: list[Done] = []
    while (at := engine.next_at()) is not None and at < now:
        done += engine.advance(at)
    if now < math.inf:
        done += engine.advance(now)
    return done


def lived_slowly(engine: DumbEngine, made: list[Chain], todo: list[Call]) -> list[Done]:
    for at, what, name, chain, sampled, value in todo:
        if what == "submit":
            engine.submit(name, made[chain], sampled, at, value)
        elif what == "abort":
            engine.abort(name, at)
        elif what == "clear":
            engine.clear(at)
        elif what == "pause":
            engine.pause(at, at + value)
        else:
            engine.slow(at, value)
    engine.live()
    return engine.done


# Who gives way: what is free is taken first; and what it left may let in the head of the line.
@example(block=3, blocks=38, running_max=6, room=1, span=2.6875, seed=6)
@example(block=1, blocks=20, running_max=2, room=1, span=3.0, seed=0)
# One is aborted in the step in which it would have ended: it is let go in its turn.
@example(block=6, blocks=29, running_max=3, room=23, span=3.09375, seed=2239969)
@settings(max_examples=100)
@given(
    block=st.integers(1, 6),
    blocks=st.integers(20, 70),
    running_max=st.integers(1, 8),
    room=st.integers(1, 40),
    span=st.floats(0.01, 20),
    seed=st.integers(0, 2**32),
)
def test_steps_taken_together_equal_steps_taken_one_by_one(
    block: int, blocks: int, running_max: int, room: int, span: float, seed: int
) -> None:
    size = blocks * block + 30
    shape = {"block": block, "running_max": running_max, "chunk_tokens": running_max + room}
    fast = EngineModel(kv_tokens=size, **shape)
    slow = DumbEngine(kv_tokens=size, **shape)
    todo = calls(Random(seed), span)
    made, others = chains(Random(seed), block), chains(Random(seed), block)

    found, expected = lived(fast, made, todo), lived_slowly(slow, others, todo)

    assert [told(done) for done in found] == [told(done) for done in expected]
    for mine, other in zip(found, expected, strict=True):
        times = (mine.at, mine.queue_s, mine.prefill_s, mine.decode_s)
        same = (other.at, other.queue_s, other.prefill_s, other.decode_s)
        for one, two in zip(times, same, strict=True):
            assert math.isclose(one, two, rel_tol=1e-9, abs_tol=1e-9)
    assert fast.cache.used == 0
    assert [fast.cache.match(chain) for chain in made] == [
        slow.cache.match(chain) for chain in others
    ]


def told(done: Done) -> tuple[str, int, int, int]:
    return done.id, done.cached_tokens, done.recomputed_tokens, done.preemptions
