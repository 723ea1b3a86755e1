"""The baselines on cases small enough to be worked out by hand.

One replica samples 16 tokens a turn at 1 s a step, prefill costs 1 s per 1,000 tokens and the step
that ends it samples the first token: a turn alone lasts its prefill + 15 s. Prompt 32 tokens (two
blocks), each turn adds 16 + 1,984: contexts 32, 2,032, 4,032; of the 16 sampled tokens nothing is
cached, since their block is not full when the turn ends.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from sim.rollout.baselines import BASELINES, run
from sim.rollout.baselines.asynchronous import AsyncStrong
from sim.rollout.baselines.barrier import Plain, Strong, sticky_least_loaded
from sim.rollout.baselines.episodes import Episode, Loop
from sim.rollout.baselines.fleet import Engines
from sim.rollout.baselines.holding import HoldResume
from sim.rollout.costs import EngineCosts
from sim.rollout.engine import EngineModel
from sim.rollout.heap import Heap
from sim.rollout.workload import ENV_BOUND, TB_LIKE, Plan, Regime, Spread, Turn

COSTS = EngineCosts(0.0, 1.0, 0.0, 1.0, 0.0, 0.0)
SMALL = replace(
    TB_LIKE,
    cold=Spread(20.0, 0.0),
    hazard_per_s=0.0,
    start_failure=0.0,
    system_tokens=16,
    group_tokens=16,
    groups=1,
    group_size=2,
    replicas=2,
    kv_tokens=100_000,
    boxes=4,
)


class Script:
    """Plans by (group, sibling): the tool times; a box's life by (group, sibling, attempt)."""

    def __init__(
        self,
        tools: dict[tuple[int, int], tuple[float, ...]],
        lives: dict[tuple[int, int, int], float] | None = None,
    ):
        self.tools, self.lives = tools, lives or {}

    def plan(self, group: int, sibling: int, attempt: int) -> Plan:
        turns = tuple(Turn(1984, 16, tool_s) for tool_s in self.tools[group, sibling])
        life_s = self.lives.get((group, sibling, attempt), 1e12)
        tokens = 32 + 2000 * len(turns)
        return Plan(turns, 32, 20.0, False, life_s, 7.0, 1.0, False, tokens, 100.0)


def loop(kind: type[Loop], script: Script, regime: Regime = SMALL, batches: int = 1) -> Loop:
    made: Any = kind(regime, 0, batches, follow=False, costs=COSTS)
    made.workload = script
    return made  # type: ignore[no-any-return]


# Sibling 1 is back early from its first tool and stays long in its second.
SWAP = Script({(0, 0): (5.0, 5.0, 25.0), (0, 1): (1.0, 30.0, 1.0)})


def test_strong_keeps_a_session_where_its_cache_is() -> None:
    made = loop(Strong, SWAP)
    # Boxes up at 20. Sibling 0 on replica 0, 1 on replica 1: turn 1 0.032 + 15 → 35.032.
    # 0: tool → 40.032, turn 2 2 + 15 → 57.032, tool → 62.032, turn 3 2 + 15 → 79.032, tool →
    # 104.032, verify → 111.032. 1: 36.032, 53.032, 83.032, 100.032, 101.032, 108.032.
    assert made.run().first_batch_s == pytest.approx(111.032)
    # Per later turn only the sampled tokens of the turn before but the last, whose KV nobody had:
    # 2 siblings × 2 turns × 15.
    assert made.recorder.recomputed_tokens == 60


def test_plain_sends_each_turn_to_the_least_loaded_and_pays_for_it() -> None:
    made = loop(Plain, SWAP)
    # Sibling 1 is back first, at 36.032: both replicas are idle, so replica 0. Sibling 0 at 40.032:
    # replica 1. At 62.032 sibling 0 finds both idle and goes to replica 0, which knows only its
    # prompt: 4,000 tokens, 4 + 15 → 81.032, tool → 106.032, verify → 113.032.
    assert made.run().first_batch_s == pytest.approx(113.032)
    assert made.recorder.recomputed_tokens == 60 + 2000


def test_the_barrier_waits_for_the_last_group_and_then_starts_the_next_batch() -> None:
    tools = {(g, s): (5.0,) for g in range(4) for s in range(2)}
    made = loop(Plain, Script(tools | {(1, 1): (65.0,)}), replace(SMALL, groups=2, replicas=4), 2)
    # One each: 20 + 15.032 + 5 + 7 = 47.032, and 60 s more for the slow tool; boxes that are free
    # meanwhile start nothing. Then 47.016, since the system prompt is cached by now.
    found = made.run()
    assert (found.first_batch_s, found.interval_s) == pytest.approx((107.032, 47.016))


def test_a_group_that_is_hurt_runs_again_whole_at_once() -> None:
    tools = {(0, s): (5.0,) for s in range(2)}
    made = loop(Plain, Script(tools, {(0, 1, 0): 18.0}))
    # Up at 20, the box is lost at 38 (in its tool); both start again, cold: up at 58, turn →
    # 73 + prefill, tool, verify: 38 + 47 + prefill. The prompt of 32 is cached on both replicas;
    # its last block is computed again: 0.016.
    found = made.run()
    assert found.first_batch_s == pytest.approx(38 + 47.016)
    assert (found.attempts, found.lost) == (4, 1)
    assert [sample.attempt for sample in made.recorder.samples] == [1, 1]


def test_a_start_that_fails_is_found_out_when_it_should_be_up() -> None:
    class Fails(Script):
        def plan(self, group: int, sibling: int, attempt: int) -> Plan:
            plan = super().plan(group, sibling, attempt)
            return plan._replace(start_fails=(sibling, attempt) == (1, 0))

    made = loop(Strong, Fails({(0, 0): (5.0,), (0, 1): (5.0,)}))
    # Both up at 20; sibling 0 has begun its turn on replica 0, which its step's end (0.032 s)
    # drops. Again cold at 20: up at 40, 0.032 or less of prefill.
    assert made.run().first_batch_s == pytest.approx(67.0, abs=0.05)


def test_the_asynchronous_loop_trains_the_first_complete_group_and_carries_the_slow_on() -> None:
    tools = {(g, s): (5.0,) for g in range(8) for s in range(2)}
    made = loop(
        AsyncStrong, Script(tools | {(0, 1): (65.0,)}), replace(SMALL, replicas=4), batches=2
    )
    # All four boxes are spares that are up at 20, handed out at 20.05: groups 0 and 1 start, one
    # sibling per replica: 20.05 + 15.032 + 5 + 7 = 47.082 for group 1. Its boxes go on to group 2
    # cold (a spare is not ready): 20 + 15.016 + 12 later, at 94.098, while group 0 ends at 107.
    found = made.run()
    assert [batch.groups for batch in made.recorder.batches] == [(1,), (2,)]
    assert found.first_batch_s == pytest.approx(47.082)


class Watched(AsyncStrong):
    """Notes when it launched and the pressure that it saw."""

    def begin(self) -> None:
        self.seen: list[tuple[float, int]] = []
        super().begin()

    def launch(self, episode: Episode) -> None:
        self.seen.append((self.heap.now, self.pressure_tokens))
        super().launch(episode)


def test_the_asynchronous_loop_launches_no_more_above_its_pressure() -> None:
    tools = {(g, s): (5.0, 5.0) for g in range(16) for s in range(2)}
    regime = replace(SMALL, boxes=8, replicas=1, kv_tokens=5_000)
    made = Watched(regime, 0, 4, follow=False, costs=COSTS)
    made.workload = Script(tools)  # type: ignore[assignment]
    made.run()
    # At 20 everybody is small: all 8 boxes. From their first observations on the contexts are over
    # 0.6 × 5,000, also when the boxes of the first group are free again (74.2): not one starts
    # until the last of the eight is at its verifier.
    assert [at for at, _ in made.seen[:8]] == [20.0] * 8
    assert max(pressure for _, pressure in made.seen) < 3_000
    assert made.seen[8][0] > made.recorder.batches[2].at


def test_hold_resume_holds_at_a_tool_boundary_until_it_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tools = {(g, s): (5.0, 5.0) for g in range(3) for s in range(2)}
    regime = replace(SMALL, replicas=1, kv_tokens=4_000, boxes=2)
    monkeypatch.setattr(HoldResume, "reserve_share", 0.002)  # else so small a cache takes nobody
    made = loop(HoldResume, Script(tools), regime)
    # Both up at 20.05. The first step is sibling 0's prefill (0.032); the second samples its next
    # token and prefills what sibling 1 does not find cached of the prompt, one block: 1.016. From
    # 21.098 on both sample: 0 needs 14 steps more, 1 needs 15: 35.098 and 36.098.
    # 0 is back at 40.098: 2,032 + 48 of 3,800 tokens: goes on, 2 + 15 → 57.098. 1 is back at
    # 41.098: 2,032 + 2,032 > 3,800: held. At 62.098 sibling 0 goes to its verifier, so 1 goes on:
    # 2 + 15 → 79.098, tool → 84.098, verify → 91.098.
    found = made.run()
    assert found.first_batch_s == pytest.approx(91.098)
    # Held 41.098 → 62.098, of which both block the batch: half.
    assert found.split_s["hold"] == pytest.approx(21.0 / 2)


def test_hold_resume_launches_a_lost_sibling_alone() -> None:
    tools = {(g, s): (5.0,) for g in range(4) for s in range(2)}
    made = loop(HoldResume, Script(tools, {(0, 1, 0): 10.0}), replace(SMALL, boxes=2))
    made.run()
    attempts = {(s.sibling, s.attempt) for s in made.recorder.samples}
    assert attempts == {(0, 0), (1, 1)}


def test_a_session_moves_at_eight_more_and_twice_as_many() -> None:
    models = [EngineModel(kv_tokens=1600) for _ in range(2)]
    engines = Engines(Heap(), models, lambda done: None)
    engines.in_flight[:] = [7, 0]
    assert sticky_least_loaded(engines, 0) == 0
    engines.in_flight[:] = [8, 0]
    assert sticky_least_loaded(engines, 0) == 1
    engines.in_flight[:] = [17, 9]
    assert sticky_least_loaded(engines, 0) == 0
    engines.in_flight[:] = [18, 9]
    assert sticky_least_loaded(engines, 0) == 1


def test_equal_seeds_answer_in_the_same_order_at_the_same_times() -> None:
    regime = replace(ENV_BOUND, groups=2, group_size=2, replicas=2, boxes=8)
    traces = []
    for seed in (3, 3, 4):
        made = AsyncStrong(regime, seed, 2, trace=True)
        made.run()
        traces.append(made.heap.trace)
    assert traces[0] == traces[1] != traces[2]


@pytest.mark.parametrize("name", sorted(BASELINES))
def test_every_group_has_a_fate_and_equal_seeds_give_equal_figures(name: str) -> None:
    regime = replace(ENV_BOUND, groups=4, group_size=2, replicas=2, boxes=12, start_failure=0.1)
    one, two = (run(name, regime, 3, 5) for _ in range(2))
    assert one == two
    assert one.fates == 1.0
    assert one.lost > 0
    assert sum(one.split_s.values()) == pytest.approx(one.interval_mean_s)
    assert one != run(name, regime, 4, 5)
