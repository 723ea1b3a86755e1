"""Each check of the performance world is set off by what it forbids."""

from __future__ import annotations

import pytest

from muster.types import EpisodeKey, Fate, Limits, SamplingParams
from services.readybank.events import Batch, BatchMember
from services.router import events as e
from services.router.rules import RouterRules
from sim.rollout.chain import Chain
from sim.rollout.checks import Checks, Violated
from sim.rollout.engine import EngineModel
from sim.rollout.talk import Talk
from sim.rollout.workload import TB_LIKE, Workload

RULES = RouterRules(
    "sim",
    1,
    admission="kv_fit",
    placement="predicted_finish",
    episodes_max=1,
    fair_hold_s=100.0,
)
PLAN = Workload(TB_LIKE, 101).plan(0, 0, 0)


def key(sibling: int = 0, attempt: int = 0) -> EpisodeKey:
    return EpisodeKey("sim", "job-00000", sibling, attempt, 1)


def acquire(of: EpisodeKey) -> e.AcquireBox:
    return e.AcquireBox(of, "host", "task", "digest", Limits())


def generate(of: EpisodeKey, turn: int = 0, replica: str = "r0") -> e.Generate:
    return e.Generate(of, replica, turn, 0, (), 10, 100, SamplingParams(), 1.0)


def checks(**tokens: int) -> Checks:
    """Conversations of so many tokens, by sibling ("s0")."""
    models = {"r0": EngineModel(kv_tokens=100_000)}
    talks = {
        key(int(name[1:])).id: Talk(0, 0, PLAN, Chain.shared(("x", size)))
        for name, size in tokens.items()
    }
    return Checks(RULES, 2, models, talks)


def test_a_second_live_attempt_of_a_sibling() -> None:
    found = checks()
    found.before(e.Tick(), [acquire(key())], 0.0)
    with pytest.raises(Violated, match="begins beside"):
        found.before(e.Tick(), [acquire(key(attempt=1))], 0.0)


def test_more_boxes_than_there_may_be() -> None:
    found = checks()
    found.before(e.BoxAcquired(key(), "host", "a", 0.0, 0.0), [], 0.0)
    with pytest.raises(Violated, match="2 boxes are in use"):
        found.before(e.BoxAcquired(key(1), "host", "b", 0.0, 0.0), [], 0.0)


def test_a_conversation_that_is_sampled_twice_at_once() -> None:
    found = checks(s0=10)
    found.before(e.Tick(), [generate(key())], 0.0)
    with pytest.raises(Violated, match="is sampled by r0 already"):
        found.before(e.Tick(), [generate(key())], 0.0)


def test_a_turn_that_is_left_out() -> None:
    with pytest.raises(Violated, match="asks for turn 1"):
        checks(s0=10).before(e.Tick(), [generate(key(), turn=1)], 0.0)


def test_one_that_does_not_fit_beside_those_that_outrank_it() -> None:
    found = checks(s0=90_000, s1=20_000)
    found.before(e.Tick(), [generate(key(0))], 0.0)
    with pytest.raises(Violated, match="90000 \\+ 20000 tokens on r0"):
        found.before(e.Tick(), [generate(key(1))], 0.0)


def test_the_first_in_rank_always_fits() -> None:
    found = checks(s0=90_000, s1=20_000)
    found.before(e.Tick(), [generate(key(1)), generate(key(0))], 0.0)


def test_a_step_while_the_conversation_samples() -> None:
    found = checks(s0=10)
    found.before(e.BoxAcquired(key(), "host", "a", 0.0, 0.0), [generate(key())], 0.0)
    with pytest.raises(Violated, match="acts while it samples"):
        found.before(e.Tick(), [e.Exec(key(), "host", "a", 0, "x", 1.0)], 0.0)


def test_a_step_in_a_box_that_was_given_back() -> None:
    found = checks()
    found.before(e.BoxAcquired(key(), "host", "a", 0.0, 0.0), [], 0.0)
    found.before(e.Tick(), [e.ReleaseBox(key(), "host", "a")], 0.0)
    with pytest.raises(Violated, match="which is not in use"):
        found.before(e.Tick(), [e.Exec(key(), "host", "a", 0, "x", 1.0)], 0.0)


def test_one_that_is_passed_over_for_ever() -> None:
    found = checks()
    found.before(e.BoxAcquired(key(), "host", "a", 0.0, 0.0), [], 0.0)
    found.before(e.Tick(), [], 2 * RULES.fair_hold_s)
    with pytest.raises(Violated, match="waits to go on"):
        found.before(e.Tick(), [], 2 * RULES.fair_hold_s + 1)


def test_a_second_fate() -> None:
    found = checks()
    found.before(e.FateRecorded("job-00000", Fate.TRAINED, 1), [], 0.0)
    with pytest.raises(Violated, match="second fate"):
        found.before(e.FateRecorded("job-00000", Fate.FILTERED), [], 0.0)


@pytest.mark.parametrize(
    ("members", "told"),
    [
        ([BatchMember("a", (0, 0)), BatchMember("a", (0, 0))], "second batch"),
        ([BatchMember("a", (0,))], "1 siblings of a"),
    ],
)
def test_a_batch_that_is_not_of_whole_new_groups(members: list[BatchMember], told: str) -> None:
    with pytest.raises(Violated, match=told):
        checks().batch(Batch(1, tuple(members), 0.0, 0.0, 1, 0))
