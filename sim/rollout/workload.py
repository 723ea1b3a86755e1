"""The simulated workload: what tasks ask for, drawn so that all arms meet the same.

Owns: the two regimes and their variants; per attempt the turns, tool times, box, verdict and
failure. Promise: a plan depends on (seed, group, sibling, attempt) and on nothing else, so the
order of asking and the arm change nothing. Does not cover: engines (engine.py), the queue for
boxes (boxes.py).

Sources: medians and spreads from published traces of coding agents (TraceLab, AgentCgroup,
terminal-bench trials); docs/results/collection.md names them.
"""

from __future__ import annotations

import math
import random
from functools import lru_cache
from typing import NamedTuple

from msgspec.structs import replace

from muster.types import Value
from sim.rollout.rewards import PassRates

_HALF = math.sqrt(0.5)
DECODE_ALONE_S, DECODE_CONTEXT_S = 0.01102, 1.42e-7  # a token; and per token of its context


class Spread(Value, frozen=True):
    """A log-normal quantity; half of its log-variance is shared by the siblings of a task."""

    median: float
    sigma: float

    @property
    def mean(self) -> float:
        """Of the quantity before any cap."""
        return self.median * math.exp(self.sigma**2 / 2)


class Regime(Value, frozen=True):
    """What a batch is made of and what it runs on. Seconds and tokens."""

    name: str
    turns: Spread
    turns_max: int
    observation: Spread
    sampled: Spread
    tool: Spread
    verify: Spread
    hazard_per_s: float  # of a box: 1 % per mean `alone_s`
    boxes: int
    groups: int = 32
    group_size: int = 8
    context_limit: int = 262_144
    system_tokens: int = 1_800  # shared by all tasks
    group_tokens: int = 1_200  # shared by the siblings of a task
    step_limit_s: float = 300.0
    cold: Spread = Spread(23.0, 0.53)
    cold_at_once: int = 32
    warm_s: float = 0.05
    start_failure: float = 0.01
    pass_alpha: float = 0.6
    pass_beta: float = 1.4
    pass_length: float = -0.43  # latent correlation: the rank correlation is about -0.3
    replicas: int = 8
    kv_tokens: int = 600_000

    @property
    def prompt_tokens(self) -> int:
        """What an episode starts with."""
        return self.system_tokens + self.group_tokens

    @property
    def trajectories(self) -> int:
        """Of a batch."""
        return self.groups * self.group_size

    def with_kv(self, times: float) -> Regime:
        """The same with another KV cache per replica."""
        return replace(
            self, name=f"{self.name} kv x{times:g}", kv_tokens=int(self.kv_tokens * times)
        )

    def with_groups_of(self, size: int) -> Regime:
        """The same number of trajectories in groups of another size."""
        groups = self.trajectories // size
        return replace(self, name=f"{self.name} groups of {size}", groups=groups, group_size=size)

    def with_tools(self, sigma: float) -> Regime:
        """The same with another spread of tool times."""
        tool = Spread(self.tool.median, sigma)
        return replace(self, name=f"{self.name} tool sigma {sigma:g}", tool=tool)

    def with_boxes(self, boxes: int) -> Regime:
        """The same with another number of boxes."""
        return replace(self, name=f"{self.name} {boxes} boxes", boxes=boxes)

    def with_context(self, limit: int) -> Regime:
        """The same with another context limit."""
        return replace(self, name=f"{self.name} context {limit}", context_limit=limit)


TB_LIKE = Regime(
    name="tb-like",
    turns=Spread(20, 1.31),
    turns_max=100,
    observation=Spread(875, 0.8),
    sampled=Spread(214, 0.8),
    tool=Spread(0.3, 2.87),
    verify=Spread(10, 0.8),
    hazard_per_s=0.01 / 450,
    boxes=256,
)
ENV_BOUND = Regime(
    name="env-bound",
    turns=Spread(15, 0.9),
    turns_max=60,
    observation=Spread(300, 0.8),
    sampled=Spread(100, 0.8),
    tool=Spread(2.0, 2.0),
    verify=Spread(20, 0.8),
    hazard_per_s=0.01 / 300,
    boxes=512,
)
REGIMES = {regime.name: regime for regime in (TB_LIKE, ENV_BOUND)}


def variants(base: Regime) -> dict[str, Regime]:
    """What the sensitivity of a result is tried on."""
    low, high = (2.3, 3.4) if base.tool.sigma > 2.2 else (1.6, 2.4)
    found = (
        base.with_kv(0.5),
        base.with_kv(2.0),
        base.with_groups_of(4),
        base.with_groups_of(16),
        base.with_tools(low),
        base.with_tools(high),
        base.with_boxes(128),
        base.with_context(131_072),
    )
    return {regime.name: regime for regime in found}


class Turn(NamedTuple):
    """Sample `sampled_tokens`, act for `tool_s`, read `observation_tokens`.

    The last turn says that it is done, or fills the context: no tool, no observation.
    """

    observation_tokens: int
    sampled_tokens: int
    tool_s: float


class Plan(NamedTuple):
    """Everything that one attempt would do if nothing stopped it; the same in every arm."""

    turns: tuple[Turn, ...]
    prompt_tokens: int
    box_start_s: float  # of a cold start
    start_fails: bool  # at the end of the start, warm or cold
    box_life_s: float  # box-seconds after which the infrastructure takes the box
    verify_s: float  # 0 when nothing is verified
    reward: float  # 1 or 0
    context_full: bool  # ends as MODEL_FAILURE: scored
    tokens: int  # context at the end
    alone_s: float  # start to verdict, warm box, an engine to itself: the duration without an arm

    @property
    def sampled_tokens(self) -> int:
        """Of all turns."""
        return sum(turn.sampled_tokens for turn in self.turns)


class _Task(NamedTuple):
    """The siblings' share of each log-normal (standard normal), and the task's pass rate."""

    turns: float
    observation: float
    sampled: float
    tool: float
    verify: float
    start: float
    threshold: float  # a sibling passes when its latent lies below


class Workload:
    """The plans of one regime under one seed. Groups are numbered in the order of the task set."""

    def __init__(self, regime: Regime, seed: int):
        self.regime, self.seed = regime, seed
        self._rates = PassRates(regime.pass_alpha, regime.pass_beta)
        self._task = lru_cache(maxsize=4096)(self._draw_task)

    def plan(self, group: int, sibling: int, attempt: int) -> Plan:
        """What this attempt would do (about 50 µs)."""
        regime, task = self.regime, self._task(group)
        rng = random.Random(f"{self.seed}/{group}/{sibling}/{attempt}")
        gauss = rng.gauss
        own = gauss(0.0, 1.0)
        count = round(_draw(regime.turns, task.turns, own))
        turns, tokens, full, engine_s = self._turns(max(1, min(count, regime.turns_max)), task, rng)
        start_s = _draw(regime.cold, task.start, gauss(0.0, 1.0))
        start_fails = rng.random() < regime.start_failure
        life_s = rng.expovariate(regime.hazard_per_s) if regime.hazard_per_s else math.inf
        verify_s = _draw(regime.verify, task.verify, gauss(0.0, 1.0))
        lean = regime.pass_length
        latent = math.sqrt(1 - lean * lean) * gauss(0.0, 1.0) - lean * own
        reward = 1.0 if latent < task.threshold and not full else 0.0
        verify_s = 0.0 if full else verify_s
        tools_s = sum([turn.tool_s for turn in turns])
        alone_s = regime.warm_s + engine_s + tools_s + verify_s
        return Plan(
            turns, regime.prompt_tokens, start_s, start_fails, life_s,
            verify_s, reward, full, tokens, alone_s,
        )  # fmt: skip

    def _turns(
        self, count: int, task: _Task, rng: random.Random
    ) -> tuple[tuple[Turn, ...], int, bool, float]:
        """Turns, context at the end, whether it is full, engine seconds alone."""
        regime, gauss = self.regime, rng.gauss
        exp, limit, step_limit = math.exp, regime.context_limit, regime.step_limit_s
        seen, seen_own = _parts(regime.observation, task.observation)
        said, said_own = _parts(regime.sampled, task.sampled)
        took, took_own = _parts(regime.tool, task.tool)
        tokens, engine_s = regime.prompt_tokens, 0.0
        turns: list[Turn] = []
        for _ in range(count):
            observation = int(seen * exp(seen_own * gauss(0.0, 1.0))) or 1
            sampled = int(said * exp(said_own * gauss(0.0, 1.0))) or 1
            tool_s = took * exp(took_own * gauss(0.0, 1.0))
            sampled = min(sampled, limit - tokens)
            engine_s += sampled * (DECODE_ALONE_S + DECODE_CONTEXT_S * (tokens + sampled / 2))
            tokens += sampled
            if tokens >= limit:
                turns.append(Turn(0, sampled, 0.0))
                return tuple(turns), tokens, True, engine_s
            tool_s = tool_s if tool_s < step_limit else step_limit
            if tokens + observation >= limit:  # acts, but can read no more
                turns.append(Turn(limit - tokens, sampled, tool_s))
                return tuple(turns), limit, True, engine_s
            turns.append(Turn(observation, sampled, tool_s))
            tokens += observation
        tokens -= turns[-1].observation_tokens
        turns[-1] = Turn(0, turns[-1].sampled_tokens, 0.0)
        return tuple(turns), tokens, False, engine_s

    def _draw_task(self, group: int) -> _Task:
        rng = random.Random(f"{self.seed}/{group}")
        shared = [rng.gauss(0.0, 1.0) for _ in range(6)]
        lean = self.regime.pass_length
        rank = math.sqrt(1 - lean * lean) * rng.gauss(0.0, 1.0) + lean * shared[0]
        return _Task._make((*shared, self._rates.threshold(rank)))


def _parts(spread: Spread, shared: float) -> tuple[float, float]:
    """The median within a task, and the spread around it."""
    half = spread.sigma * _HALF
    return spread.median * math.exp(half * shared), half


def _draw(spread: Spread, shared: float, own: float) -> float:
    return spread.median * math.exp(spread.sigma * _HALF * (shared + own))
