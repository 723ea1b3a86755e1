"""The workload of bench.collection_real: the simulated one, scaled to a small model on processors.

Owns: the sizes, what is scaled by what, the KV budget, the factor of the waits, the words in which
a plan meets the real services. Promise: pure; equal arguments give equal plans, in
the router's process, in the simulation and in both arms. Does not cover: processes
(_real_world.py), predictions (_real_predict.py).

What is scaled: observations and sampled tokens ÷ 20; the opening is Muster's own, with 60 tokens of
a group; the context ends at 4,096 tokens; the KV tokens per trajectory of a batch are the simulated
ones ÷ 20; all waits (tools, verifiers, cold starts) times one factor, such that tools are 60 % of
an episode that has an engine to itself. No observation is shorter than the words around it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from random import Random

from msgspec.structs import replace

from muster.types import Value
from services.router import chat
from services.router.carriers import Message
from services.router.conversation import ChatCodec, Conversation
from sim.rollout.arms import HOSTS
from sim.rollout.costs import EngineCosts
from sim.rollout.workload import TB_LIKE, Plan, Regime, Spread, Turn, Workload

LESS = 20
CONTEXT = 4_096
BLOCK = 32
REPLICAS = 2
TOOL_SHARE = 0.6
DONE = "DONE"
INSTRUCTION = TB_LIKE.group_tokens // LESS  # tokens of a group's own

_BF16 = 2


class Size(Value, frozen=True):
    """How much is run. Trajectories: groups × group_size × batches. calibration_s: or a little
    longer, until there are that many entries (turns and ends)."""

    groups: int
    batches: int
    calibration_s: float
    calibration_entries: int
    turns: Spread
    turns_max: int
    reserve_tokens: int  # about 0.6 of what an episode grows by, as simulated
    group_size: int = TB_LIKE.group_size

    @property
    def trajectories(self) -> int:
        """Of a batch."""
        return self.groups * self.group_size

    @property
    def interleave_groups(self) -> int:
        """A quarter of a batch, as simulated."""
        return max(1, self.groups // 4)

    def with_batches(self, batches: int | None) -> Size:
        """The same with another number of batches; None: as it is."""
        return replace(self, batches=batches) if batches else self


FULL = Size(
    groups=8,
    batches=4,
    calibration_s=360.0,
    calibration_entries=800,
    turns=TB_LIKE.turns,
    turns_max=100,
    reserve_tokens=1_250,
)
QUICK = Size(
    groups=2,
    batches=1,
    calibration_s=60.0,
    calibration_entries=60,
    turns=Spread(5, 0.6),
    turns_max=12,
    reserve_tokens=250,
)


class Words(Value, frozen=True):
    """Tokens of what surrounds the plan: of the opening, and around an observation."""

    system: int  # shared by all groups
    group: int
    around: int  # an observation's, without its output


class Added(Value, frozen=True):
    """Seconds that real services take beyond a plan."""

    box_s: float = 0.0  # to start a box
    step_s: float = 0.0  # of a tool call: from the reply to the next request
    verify_s: float = 0.0


NOTHING = Added()


class Book(Value, frozen=True):
    """Everything that the planned replies of one run depend on. cold: boxes take their time."""

    regime: Regime
    seed: int
    words: Words
    cold: bool = False

    def planned(self, more: Added = NOTHING) -> Planned:
        """Its plans, with what real services add to each wait."""
        return Planned(self, more)


class Planned(Workload):
    """The plans of a book."""

    def __init__(self, book: Book, more: Added):
        super().__init__(book.regime, book.seed)
        self._least, self._more = book.words.around + 1, more

    def plan(self, group: int, sibling: int, attempt: int) -> Plan:
        """As the workload draws it, with observations that can be said."""
        drawn = super().plan(group, sibling, attempt)
        found = sayable(drawn, self._least, self.regime.context_limit)
        more = self._more
        turns = tuple(turn._replace(tool_s=turn.tool_s + more.step_s) for turn in found.turns)
        return found._replace(
            turns=turns,
            verify_s=0.0 if found.context_full else found.verify_s + more.verify_s,
            box_start_s=found.box_start_s + more.box_s,
        )


def sayable(plan: Plan, least: int, limit: int) -> Plan:
    """The plan with observations of at least so many tokens, cut where its context is full.

    The last reply of a plan that is not full says DONE: nothing follows it.
    """
    tokens, full = plan.prompt_tokens, plan.context_full
    turns: list[Turn] = []
    for number, turn in enumerate(plan.turns, 1):
        sampled = min(turn.sampled_tokens, limit - tokens)
        tokens += sampled
        ends = number == len(plan.turns) and not plan.context_full
        if tokens >= limit or ends:
            full = tokens >= limit
            turns.append(Turn(0, sampled, 0.0))
            break
        observation = min(max(turn.observation_tokens, least), limit - tokens)
        turns.append(Turn(observation, sampled, turn.tool_s))
        tokens += observation
        if tokens >= limit:
            full = True
            break
    if full:
        plan = plan._replace(reward=0.0, verify_s=0.0)
    return plan._replace(turns=tuple(turns), tokens=tokens, context_full=full)


def kv_tokens(trajectories: int) -> int:
    """KV tokens per replica: as many per trajectory of a batch as simulated, ÷ 20, whole blocks."""
    simulated = TB_LIKE.replicas * TB_LIKE.kv_tokens / TB_LIKE.trajectories / LESS
    return int(simulated * trajectories / REPLICAS) // BLOCK * BLOCK


def kv_gib(tokens: int, model: Mapping[str, int]) -> float:
    """Memory of that many KV tokens and the block that an engine keeps for itself.

    model: `config.json` of the model's folder; its KV is kept in two bytes a value.
    """
    head = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    per_token = 2 * model["num_hidden_layers"] * model["num_key_value_heads"] * head * _BF16
    return (tokens + BLOCK) * per_token / 2**30


def regime(size: Size, words: Words, kv: int) -> Regime:
    """The scaled regime, waits as simulated. Nothing is lost to infrastructure."""
    at_once = TB_LIKE.cold_at_once * size.trajectories // TB_LIKE.trajectories
    return replace(
        TB_LIKE,
        name=f"tb-like ÷ {LESS}",
        turns=size.turns,
        turns_max=size.turns_max,
        observation=replace(TB_LIKE.observation, median=TB_LIKE.observation.median / LESS),
        sampled=replace(TB_LIKE.sampled, median=TB_LIKE.sampled.median / LESS),
        hazard_per_s=0.0,
        start_failure=0.0,
        boxes=size.trajectories,
        groups=size.groups,
        group_size=size.group_size,
        context_limit=CONTEXT,
        system_tokens=words.system,
        group_tokens=words.group,
        cold_at_once=max(HOSTS, at_once),
        replicas=REPLICAS,
        kv_tokens=kv,
    )


def with_waits(base: Regime, times: float) -> Regime:
    """The same with all waits times a factor."""
    tool, verify, cold = (
        replace(spread, median=spread.median * times)
        for spread in (base.tool, base.verify, base.cold)
    )
    limit = base.step_limit_s * times
    return replace(base, tool=tool, verify=verify, cold=cold, step_limit_s=limit)


def with_warm(base: Regime, start_s: float) -> Regime:
    """The same where every box is there after `start_s`: there is nothing to set up."""
    return replace(base, warm_s=start_s, cold=Spread(0.0, 0.0))


def engine_alone_s(plan: Plan, costs: EngineCosts) -> float:
    """Seconds of an engine that has nothing else to do; all but what is new is cached."""
    total, context, fresh = 0.0, plan.prompt_tokens, plan.prompt_tokens
    for turn in plan.turns:
        middle = context + turn.sampled_tokens / 2
        total += costs.prefill_s(fresh) + turn.sampled_tokens * costs.step_s(1, middle)
        context += turn.sampled_tokens + turn.observation_tokens
        fresh = turn.observation_tokens
    return total


def wait_factor(plans: Iterable[Plan], costs: EngineCosts) -> float:
    """What all waits are multiplied with, so that tools are TOOL_SHARE of tools and engine.

    Over all plans together, each alone. Plans are those of waits as simulated.
    """
    tools = engine = 0.0
    for plan in plans:
        tools += math.fsum(turn.tool_s for turn in plan.turns)
        engine += engine_alone_s(plan, costs)
    return TOOL_SHARE / (1 - TOOL_SHARE) * engine / tools


# -- words ---------------------------------------------------------------------------------


def instruction(group: int, tokens: int = INSTRUCTION) -> str:
    """A group's share of the opening: digits, a token each."""
    return digits(f"group {group}", tokens)


def digits(name: str, count: int) -> str:
    """Always the same ones under one name."""
    draw = Random(name)
    return "".join(draw.choice("0123456789") for _ in range(count))


def words(codec: ChatCodec) -> Words:
    """What a model's tokenizer and template make of the fixed words."""
    talks = [Conversation(codec) for _ in range(2)]
    for number, talk in enumerate(talks):
        talk.open(chat.opening(instruction(number)))
    first, second = (talk.context for talk in talks)
    pairs = zip(first, second, strict=False)
    shared = next((n for n, (a, b) in enumerate(pairs) if a != b), len(first))
    before = len(first)
    talks[0].observe(Message("user", chat.observation(0, 0.1, "7", "none")))
    return Words(shared, before - shared, len(talks[0]) - before - 1)


def reply(plan: Plan, number: int, name: str, around: int) -> str:
    """The text of a planned reply: a command that takes its time and prints, or the end."""
    turn = plan.turns[number]
    if number + 1 == len(plan.turns) and not plan.context_full:
        return DONE
    output = digits(f"{name}.{number}", max(1, turn.observation_tokens - around))
    return f"```bash\nsleep {turn.tool_s:.3f}; printf %s {output}\n```"
