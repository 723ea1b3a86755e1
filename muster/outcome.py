"""Evidence in, label out: the sole judge of model against infrastructure failure (DESIGN §7).

Owns: the rules, one function per kind of evidence, and `judge`. Promise: pure, total, and every
label names its cause; what no rule covers is UNKNOWN, which is held and never trained.
Does not cover: how often a sibling is repaired (the router), what a group with gaps is worth
(the bank).
"""

from __future__ import annotations

from enum import StrEnum

from muster.types import Outcome, OutcomeLabel, StepLimit, Value, VerdictStatus


class End(StrEnum):
    """Why an episode stopped acting."""

    DONE = "done"  # the model said so
    TURNS = "turns"  # turn budget used up
    TOKENS = "tokens"  # token budget used up
    TIME = "time"  # episode time used up while the model was acting
    CONTEXT = "context"  # the context is full
    UNPARSEABLE = "unparseable"  # k unparseable replies in a row
    BOX_BROKEN = "box_broken"  # the agent's own processes made the box unusable
    INFRA = "infra"  # a part of Muster failed: `failure` says which
    CANCELLED = "cancelled"  # the job was cancelled


class Failure(StrEnum):
    """What failed when End is INFRA."""

    NONE = "none"
    BOX_START = "box_start"
    HOST_LOST = "host_lost"
    SERVICE_CALL = "service_call"
    ENGINE = "engine"
    NETWORK_NEED = "network_need"
    RECORD_LOST = "record_lost"  # what a former router recorded of the attempt is not all there
    REPLAY_DIFFERS = "replay_differs"  # a lost box could not be rebuilt: its steps answer otherwise


class Verdict(Value, frozen=True):
    """One verification."""

    status: VerdictStatus
    reward: float = 0.0
    detail: str = ""


class Evidence(Value, frozen=True):
    """All that is known of an ended attempt."""

    end: End
    failure: Failure = Failure.NONE
    detail: str = ""
    threshold: float = 1.0  # reward from which an attempt is a success
    limit: StepLimit = StepLimit.NONE  # the last limit that ended a step
    starved: bool = False  # CPU time and pressure stall say that the host was slow
    actions: int = 0  # commands run
    tokens: int = 0  # sampled tokens
    killed_hosts: int = 0  # different hosts on which the same command killed box or host
    verdicts: tuple[Verdict, ...] = ()  # in the order in which they were given
    wall_s: float = 0.0
    cpu_s: float = 0.0
    cpu_stall_s: float = 0.0
    replays: int = 0  # boxes rebuilt by replay


def starved(wall_s: float, cpu_s: float, cpu_stall_s: float) -> bool:
    """True when a step that ran out of time mostly waited for a processor of a busy host.

    A command that sleeps, waits for a lock or for input uses no processor and waits for none, so
    its stall is small: that is the command's doing. One that computes gets either the processor
    (cpu_s grows) or pressure stall (cpu_stall_s grows). Starved: more than half of the wall time
    was stall, and more than what it computed. A stall of less than 0 means that the kernel does
    not tell: then nobody is excused.
    """
    return cpu_stall_s > 0.5 * wall_s > 0.0 and cpu_stall_s > cpu_s


def needs_rerun(verdict: Verdict) -> bool:
    """True for a verdict that is ambiguous and is given once more, in a fresh box."""
    return _status(verdict) in (VerdictStatus.TIMEOUT, VerdictStatus.INVALID)


def verifiable(end: End) -> bool:
    """True when what is in the box is judged although the episode may have been cut."""
    return end is End.DONE or end in _BUDGETS


_BUDGETS = (End.TURNS, End.TOKENS, End.TIME)


def _status(verdict: Verdict) -> VerdictStatus:
    """A reward that is not finite or not within 0 and 1 is no verdict, whoever passed it on."""
    if verdict.status is VerdictStatus.REWARDED and not 0.0 <= verdict.reward <= 1.0:
        return VerdictStatus.INVALID
    return verdict.status


def judge(evidence: Evidence) -> OutcomeLabel:
    """The label of an attempt. The first rule that speaks decides."""
    for rule in (_killer_command, _infrastructure, _starved, _idle, _own_fault, _verdict):
        found = rule(evidence)
        if found is not None:
            return found
    return _label(evidence, Outcome.UNKNOWN, f"no rule for an end by {evidence.end}")


def _killer_command(e: Evidence) -> OutcomeLabel | None:
    """The same command killed box or host twice, on different hosts: it is the command."""
    if e.killed_hosts >= 2:
        return _label(e, Outcome.MODEL_FAILURE, "command_kills_hosts")
    return None


def _infrastructure(e: Evidence) -> OutcomeLabel | None:
    if e.end is End.INFRA:
        known = e.failure is not Failure.NONE
        return _label(
            e, Outcome.INFRA_FAILURE if known else Outcome.UNKNOWN, e.failure if known else "infra"
        )
    return None


def _starved(e: Evidence) -> OutcomeLabel | None:
    if e.starved and (e.limit is StepLimit.TIME or e.end is End.TIME):
        return _label(e, Outcome.INFRA_FAILURE, "host_starved")
    return None


def _idle(e: Evidence) -> OutcomeLabel | None:
    """Nothing was done and nothing was said until the deadline: the model never had a chance."""
    if e.end is End.TIME and e.actions == 0 and e.tokens == 0:
        return _label(e, Outcome.INFRA_FAILURE, "zero_activity")
    return None


def _own_fault(e: Evidence) -> OutcomeLabel | None:
    """The model's own actions ended it; what stands in the box is not judged."""
    if e.end in (End.CONTEXT, End.UNPARSEABLE):
        return _label(e, Outcome.MODEL_FAILURE, e.end)
    if e.end is End.BOX_BROKEN:
        by = e.limit if e.limit is not StepLimit.NONE else "agent"
        return _label(e, Outcome.MODEL_FAILURE, f"box_broken_by_{by}")
    return None


def _verdict(e: Evidence) -> OutcomeLabel | None:
    if not verifiable(e.end):
        return None
    if not e.verdicts:
        budget = e.end in _BUDGETS
        return _label(e, Outcome.MODEL_FAILURE, f"budget_{e.end}") if budget else None
    last = e.verdicts[-1]
    before, status = _status(e.verdicts[0]), _status(last)
    flaky = len(e.verdicts) > 1 and before is not status
    if status is VerdictStatus.SETUP_FAILED:
        return _label(e, Outcome.INFRA_FAILURE, "verifier_setup", detail=last.detail, flaky=flaky)
    if status is VerdictStatus.REWARDED:
        return _scored(e, last, flaky=flaky)
    if len(e.verdicts) < 2:
        return _label(e, Outcome.UNKNOWN, "verdict_not_rerun", detail=last.detail)
    # Twice without a usable verdict: the agent's files are what both runs had in common.
    detail = last.detail or f"reward {last.reward!r}"
    return _label(e, Outcome.MODEL_FAILURE, f"verifier_{status}", detail=detail, flaky=flaky)


def _scored(e: Evidence, verdict: Verdict, *, flaky: bool) -> OutcomeLabel:
    success = verdict.reward >= e.threshold
    if success:
        cause = "passed"
    else:
        cause = f"budget_{e.end}" if e.end in _BUDGETS else "not_passed"
    outcome = Outcome.MODEL_SUCCESS if success else Outcome.MODEL_FAILURE
    return _label(e, outcome, cause, reward=verdict.reward, flaky=flaky, detail=verdict.detail)


def _label(
    e: Evidence,
    outcome: Outcome,
    cause: str,
    *,
    reward: float | None = None,
    flaky: bool = False,
    detail: str = "",
) -> OutcomeLabel:
    scored = outcome is Outcome.MODEL_FAILURE and reward is None
    return OutcomeLabel(
        outcome=outcome,
        cause=str(cause),
        reward=0.0 if scored else reward,
        limit="" if e.limit is StepLimit.NONE else str(e.limit),
        wall_s=e.wall_s,
        cpu_s=e.cpu_s,
        cpu_stall_s=e.cpu_stall_s,
        replays=e.replays,
        flaky=flaky,
        detail=detail or e.detail,
    )
