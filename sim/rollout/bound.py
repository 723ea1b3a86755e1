"""Lower bounds of the interval between batches, from exactly the groups that an arm trained.

Owns: engine demand of a set of trajectories and what the KV budget adds to it. Promise: pure; A, B
and `boxes_s` are true bounds of the models in this package, C is a reference. Does not cover:
failures (attempts that were lost are no demand), the cold first batch.

Per trajectory, with R replicas of K tokens of KV, costs as in costs.py:
- prefill P: each observation and sampled reply's continuation is prefilled once, the request's base
  is paid each turn, the group's prompt is paid by its first sibling, the system prompt by nobody;
- decode Q = Σ over the decode steps of each turn of (request cost + context cost × context): one
  for each sampled token but the first, which the prefill gives;
- D = Σ over these steps of the context beyond the shared prompt, W = ∫ of it over tool times.

A = (P + Q) / R: a perfect cache, steps are free.
B = A + step base × D / K / R: all requests of a step hold their context, which fits K, so there are
    at least D / K steps.
C = A + step base × D / ((1 - w) K) / R, w = W / (K R C): caches are kept through tool times, which
    takes the share w of the KV from those that sample. An arm may drop caches instead.
boxes_s = Σ `alone_s` / boxes: every attempt holds a box at least as long as it takes alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from muster.types import Value
from sim.rollout.costs import EngineCosts
from sim.rollout.measure import Sample
from sim.rollout.workload import Plan, Regime, Workload


class Demand(Value, frozen=True):
    """Of some trajectories, over all replicas."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    decode_context: float = 0.0  # D: token-tokens
    tool_context: float = 0.0  # W: token-seconds
    box_s: float = 0.0
    decode_steps: int = 0

    def __add__(self, other: Demand) -> Demand:
        return Demand(
            self.prefill_s + other.prefill_s,
            self.decode_s + other.decode_s,
            self.decode_context + other.decode_context,
            self.tool_context + other.tool_context,
            self.box_s + other.box_s,
            self.decode_steps + other.decode_steps,
        )


class Bounds(Value, frozen=True):
    """Seconds per batch; see the module."""

    a_s: float
    b_s: float
    c_s: float
    boxes_s: float

    @property
    def true_s(self) -> float:
        """The largest true bound."""
        return max(self.b_s, self.boxes_s)


def demand(plan: Plan, regime: Regime, costs: EngineCosts, *, first: bool) -> Demand:
    """Of one trajectory; `first` in its group: it prefills the group's prompt."""
    shared, context = regime.prompt_tokens, plan.prompt_tokens
    new = regime.group_tokens if first else 0
    prefill_s = decode_s = held = waited = 0.0
    taken = 0
    for turn in plan.turns:
        prefill_s += costs.prefill_s(new)
        steps = max(turn.sampled_tokens - 1, 0)
        seen = steps * (context + turn.sampled_tokens / 2)
        decode_s += steps * costs.decode_request_s + seen * costs.decode_context_s
        held += seen - steps * shared
        context += turn.sampled_tokens
        waited += turn.tool_s * (context - shared)
        context += turn.observation_tokens
        new = turn.observation_tokens
        taken += steps
    return Demand(prefill_s, decode_s, held, waited, plan.alone_s, taken)


def bounds_of(total: Demand, regime: Regime, costs: EngineCosts, batches: float) -> Bounds:
    """Bounds per batch of a demand over `batches` batches."""
    replicas, kv = regime.replicas, float(regime.kv_tokens)
    a_s = (total.prefill_s + total.decode_s) / replicas / batches
    steps_s = costs.decode_base_s * total.decode_context / kv / replicas / batches
    kept = total.tool_context / kv / replicas / batches  # w × C
    # C = a + steps / (1 - kept / C) ⇔ C² - (a + steps + kept) C + a × kept = 0; the larger root.
    half = (a_s + steps_s + kept) / 2
    c_s = half + max(half * half - a_s * kept, 0.0) ** 0.5
    return Bounds(a_s, a_s + steps_s, c_s, total.box_s / regime.boxes / batches)


def bounds(
    samples: Iterable[Sample], workload: Workload, costs: EngineCosts, batches: float
) -> Bounds:
    """Bounds per batch of what was trained in `batches` batches."""
    total, groups = Demand(), set()
    for sample in samples:
        plan = workload.plan(sample.group, sample.sibling, sample.attempt)
        first = sample.group not in groups
        groups.add(sample.group)
        total += demand(plan, workload.regime, costs, first=first)
    return bounds_of(total, workload.regime, costs, batches)


def peak_rate(regime: Regime, costs: EngineCosts, *, tasks: int = 64) -> float:
    """Calibrated peak: sampled tokens per second of a replica whose KV is full of this workload's
    contexts, each weighted by the steps taken at it, and that never prefills.

    With KV full of contexts of mean c, K / c requests share a step; c = D / decode steps + the
    shared prompt, from `tasks` tasks of a seed that nothing else uses.
    """
    workload = Workload(regime, seed=-1)
    total = Demand()
    for task in range(tasks):
        total += demand(workload.plan(task, 0, 0), regime, costs, first=False)
    mean = total.decode_context / total.decode_steps + regime.prompt_tokens
    return costs.peak_rate(regime.kv_tokens, mean)
