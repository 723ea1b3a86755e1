"""The arms that run on the production machines, and what each lever is in their configuration.

Owns: which values of RouterRules, PoolRules and BankRules an arm stands for. Promise: an arm is
configuration and nothing else; the values that no lever touches are the same in all arms. Does not
cover: the baselines of others (baselines.py), which have programs of their own.
"""

from __future__ import annotations

from msgspec.structs import replace

from muster.types import JobPolicy, SamplingParams, Value
from services.readybank.events import BankRules
from services.router.events import JobSpec, TaskInfo
from services.router.rules import RouterRules
from services.sandbox.pool import PoolRules
from sim.rollout.workload import Regime

LEVERS = ("routing", "boxes", "assembly", "admission", "priority")
LAG_MAX = 16  # of launches; wide, as the lag is measured
REPAIRS_MAX = 2
HOSTS = 4
_UNLIMITED = 1 << 40
_NEVER_S = 1e12


class Arm(Value, frozen=True):
    """One configuration. `levers`: those of LEVERS that are on; the texts override single rules.

    routing: predicted finish, else the least loaded replica each turn. boxes: set up once a task
    and host, then started from that snapshot, else cold. assembly: the bank takes whole groups
    while later ones run, a lost sibling alone is repaired; else the batch's groups are launched
    together and waited for, a group that lost a sibling is replaced. admission: KV-Fit, else
    everybody goes on. priority: larger contexts first, else in the order of arrival (only
    admission looks at it).
    """

    name: str
    levers: tuple[str, ...] = LEVERS
    placement: str = ""
    admission: str = ""
    rank: str = ""
    lag_max: int | None = None

    def has(self, lever: str) -> bool:
        return lever in self.levers


MUSTER = Arm("muster")
MACHINE_PLAIN = Arm("machine, no lever", ())
ALONE = tuple(Arm(f"only {lever}", (lever,)) for lever in LEVERS)
MINUS = tuple(Arm(f"without {x}", tuple(y for y in LEVERS if y != x)) for x in LEVERS)
ADMISSION_AND_PRIORITY = Arm("only admission + priority", ("admission", "priority"))
OTHERS = (
    Arm("smallest context first", rank="smallest_context"),
    Arm("oldest group first", rank="oldest_group"),
    Arm("hold above 95 %, resume the smallest", admission="hold_resume"),
    Arm("launches held back by pressure", admission="pressure"),
    Arm("sticky least-loaded", placement="sticky_least_loaded"),
    Arm("launched at most 4 ahead", lag_max=4),
    Arm("launched at most 1 ahead", lag_max=1),
)
ARMS = {
    arm.name: arm
    for arm in (MUSTER, MACHINE_PLAIN, *ALONE, *MINUS, ADMISSION_AND_PRIORITY, *OTHERS)
}


def router_rules(arm: Arm, regime: Regime) -> RouterRules:
    """Of the arm's router. Budgets of tokens and time never end an episode: its plan does."""
    ahead = LAG_MAX if arm.has("assembly") else 0
    routing = "predicted_finish" if arm.has("routing") else "least_loaded"
    return RouterRules(
        run="sim",
        owner_epoch=1,
        groups_per_batch=regime.groups,
        repairs_max=REPAIRS_MAX if arm.has("assembly") else 0,
        lag_max=ahead if arm.lag_max is None else arm.lag_max,
        episodes_max=regime.boxes,
        turns_max=4 * regime.turns_max,
        turn_tokens_max=_UNLIMITED,
        episode_tokens_max=_UNLIMITED,
        context_tokens_max=regime.context_limit,
        box_steps_max=4 * regime.turns_max,
        step_timeout_s=regime.step_limit_s,
        episode_timeout_s=_NEVER_S,
        generate_timeout_s=_NEVER_S,
        hold_max_s=_NEVER_S,
        infra_ceiling=1.0,
        resume_wait_s=0.0,
        stall_s=_NEVER_S,
        probes=True,
        placement=arm.placement or routing,
        admission=arm.admission or ("kv_fit" if arm.has("admission") else "none"),
        rank=arm.rank or ("largest_context" if arm.has("priority") else "arrival"),
    )


def pool_rules(arm: Arm, regime: Regime) -> PoolRules:
    """Of each host; together they have the regime's boxes and starts."""
    return PoolRules(
        boxes_max=regime.boxes // HOSTS,
        starting_max=regime.cold_at_once // HOSTS,
        building_max=regime.cold_at_once // HOSTS,
        waiting_max=4 * regime.boxes,
        idle_s=_NEVER_S,
        adopt_s=_NEVER_S,
        warm_max=0,  # a box from its snapshot comes up as fast as a warm one is handed over
    )


def bank_rules(arm: Arm, regime: Regime) -> BankRules:
    """Of the arm's bank. Without sibling repair only a group of valid siblings is trained on."""
    found = BankRules(repairs_max=REPAIRS_MAX, stall_s=_NEVER_S)
    if arm.has("assembly"):
        return found
    return replace(found, repairs_max=0, valid_min=regime.group_size)


def job(regime: Regime, groups: int) -> JobSpec:
    """One task a group, so that each has a set-up of its own."""
    tasks = tuple(
        TaskInfo(f"task-{n}", f"digest-{n}", "", max_turns=4 * regime.turns_max)
        for n in range(2 * groups)
    )
    return JobSpec(
        id="job",
        tasks=tasks,
        groups=groups,
        group_size=regime.group_size,
        sampling=SamplingParams(seed=1),
        submitted_unix_s=0.0,
        policy=JobPolicy(),
    )
