"""One row of the table per rule of DESIGN §7: evidence in, label out."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from muster.outcome import End, Evidence, Failure, Verdict, judge, needs_rerun, verifiable
from muster.types import Outcome, OutcomeLabel, StepLimit, VerdictStatus

SUCCESS, FAILURE = Outcome.MODEL_SUCCESS, Outcome.MODEL_FAILURE
INFRA, UNKNOWN = Outcome.INFRA_FAILURE, Outcome.UNKNOWN
WORKED = Evidence(End.DONE, actions=3, tokens=100)


def rewarded(reward: float) -> Verdict:
    return Verdict(VerdictStatus.REWARDED, reward)


TIMEOUT, INVALID = Verdict(VerdictStatus.TIMEOUT), Verdict(VerdictStatus.INVALID)
SETUP = Verdict(VerdictStatus.SETUP_FAILED, detail="no curl")


def evidence(end: End = End.DONE, *verdicts: Verdict, **more: object) -> Evidence:
    return replace(WORKED, end=end, verdicts=verdicts, **more)


ROWS: list[tuple[str, Evidence, Outcome, str, float | None]] = [
    # verifier ran, reward finite and in range
    ("reward at the threshold", evidence(End.DONE, rewarded(1.0)), SUCCESS, "passed", 1.0),
    (
        "reward at a lower threshold",
        evidence(End.DONE, rewarded(0.5), threshold=0.5),
        SUCCESS,
        "passed",
        0.5,
    ),
    (
        "partial reward is kept",
        evidence(End.DONE, rewarded(0.7)),
        FAILURE,
        "not_passed",
        0.7,
    ),
    ("no reward", evidence(End.DONE, rewarded(0.0)), FAILURE, "not_passed", 0.0),
    # a budget ended it while the model was acting: verify what is there; else MODEL_FAILURE
    ("turns used up, solved", evidence(End.TURNS, rewarded(1.0)), SUCCESS, "passed", 1.0),
    ("turns used up", evidence(End.TURNS, rewarded(0.0)), FAILURE, "budget_turns", 0.0),
    ("tokens used up", evidence(End.TOKENS, rewarded(0.2)), FAILURE, "budget_tokens", 0.2),
    ("time used up", evidence(End.TIME, rewarded(0.0)), FAILURE, "budget_time", 0.0),
    ("time used up, nothing to verify", evidence(End.TIME), FAILURE, "budget_time", 0.0),
    ("turns used up, nothing to verify", evidence(End.TURNS), FAILURE, "budget_turns", 0.0),
    (
        "a step's time limit, then done",
        evidence(End.DONE, rewarded(0.0), limit=StepLimit.TIME),
        FAILURE,
        "not_passed",
        0.0,
    ),
    # … but the step was starved
    (
        "a starved step's time limit",
        evidence(End.DONE, rewarded(0.0), limit=StepLimit.TIME, starved=True),
        INFRA,
        "host_starved",
        None,
    ),
    (
        "a starved episode's time",
        evidence(End.TIME, rewarded(0.0), starved=True),
        INFRA,
        "host_starved",
        None,
    ),
    (
        "starved, but no time limit fired",
        evidence(End.DONE, rewarded(1.0), starved=True),
        SUCCESS,
        "passed",
        1.0,
    ),
    # box killed by its own limits through the agent's processes; agent broke its own box
    *[
        (
            f"box broken by {limit}",
            evidence(End.BOX_BROKEN, limit=limit),
            FAILURE,
            f"box_broken_by_{limit}",
            0.0,
        )
        for limit in (StepLimit.MEMORY, StepLimit.PIDS, StepLimit.DISK)
    ],
    ("agent broke its box", evidence(End.BOX_BROKEN), FAILURE, "box_broken_by_agent", 0.0),
    # k unparseable replies in a row; context full
    ("unparseable replies", evidence(End.UNPARSEABLE), FAILURE, "unparseable", 0.0),
    ("context full", evidence(End.CONTEXT), FAILURE, "context", 0.0),
    # a part of Muster failed
    *[
        (f"{failure} failed", evidence(End.INFRA, failure=failure), INFRA, str(failure), None)
        for failure in Failure
        if failure is not Failure.NONE
    ],
    # the same command kills box or host twice on different hosts
    (
        "a command that kills hosts",
        evidence(End.INFRA, failure=Failure.HOST_LOST, killed_hosts=2),
        FAILURE,
        "command_kills_hosts",
        0.0,
    ),
    (
        "a command that killed one host",
        evidence(End.INFRA, failure=Failure.HOST_LOST, killed_hosts=1),
        INFRA,
        "host_lost",
        None,
    ),
    # verifier could not start or its own set-up failed
    ("verifier set-up failed", evidence(End.DONE, SETUP), INFRA, "verifier_setup", None),
    # verifier timed out, or left no verdict, or one that is not finite or out of range
    (
        "verifier timed out twice",
        evidence(End.DONE, TIMEOUT, TIMEOUT),
        FAILURE,
        "verifier_timeout",
        0.0,
    ),
    (
        "no verdict twice",
        evidence(End.DONE, INVALID, INVALID),
        FAILURE,
        "verifier_invalid",
        0.0,
    ),
    (
        "a reward that is no number, twice",
        evidence(End.DONE, rewarded(math.nan), rewarded(math.nan)),
        FAILURE,
        "verifier_invalid",
        0.0,
    ),
    (
        "a reward out of range, then a good one",
        evidence(End.DONE, rewarded(7.0), rewarded(1.0)),
        SUCCESS,
        "passed",
        1.0,
    ),
    (
        "timed out, then judged",
        evidence(End.DONE, TIMEOUT, rewarded(1.0)),
        SUCCESS,
        "passed",
        1.0,
    ),
    (
        "timed out, then no verdict",
        evidence(End.DONE, TIMEOUT, INVALID),
        FAILURE,
        "verifier_invalid",
        0.0,
    ),
    (
        "timed out, then set-up failed",
        evidence(End.DONE, TIMEOUT, SETUP),
        INFRA,
        "verifier_setup",
        None,
    ),
    # zero model actions and zero tokens at the deadline
    (
        "nothing done, nothing said",
        evidence(End.TIME, rewarded(0.0), actions=0, tokens=0),
        INFRA,
        "zero_activity",
        None,
    ),
    (
        "nothing done, but something said",
        evidence(End.TIME, rewarded(0.0), actions=0),
        FAILURE,
        "budget_time",
        0.0,
    ),
    # anything else
    ("not yet rerun", evidence(End.DONE, TIMEOUT), UNKNOWN, "verdict_not_rerun", None),
    ("done without a verdict", evidence(End.DONE), UNKNOWN, "no rule for an end by done", None),
    ("cancelled", evidence(End.CANCELLED), UNKNOWN, "no rule for an end by cancelled", None),
    ("a part failed, none says which", evidence(End.INFRA), UNKNOWN, "infra", None),
]


@pytest.mark.parametrize(
    ("found", "outcome", "cause", "reward"), [r[1:] for r in ROWS], ids=[r[0] for r in ROWS]
)
def test_rule(found: Evidence, outcome: Outcome, cause: str, reward: float | None) -> None:
    label = judge(found)
    assert (label.outcome, label.cause, label.reward) == (outcome, cause, reward)


@pytest.mark.parametrize("end", [End.CONTEXT, End.UNPARSEABLE])
def test_a_model_that_lost_the_thread_has_failed_whatever_stands_in_the_box(end: End) -> None:
    assert not verifiable(end)
    assert judge(evidence(end, rewarded(1.0))).outcome is FAILURE


FLAKY = [
    ((rewarded(1.0),), False),
    ((TIMEOUT, rewarded(1.0)), True),
    ((TIMEOUT, INVALID), True),
    ((TIMEOUT, SETUP), True),
    ((TIMEOUT, TIMEOUT), False),
    ((rewarded(math.inf), INVALID), False),
]


@pytest.mark.parametrize(("verdicts", "flaky"), FLAKY)
def test_a_rerun_that_differs_is_flagged(verdicts: tuple[Verdict, ...], flaky: bool) -> None:
    assert judge(evidence(End.DONE, *verdicts)).flaky is flaky


@pytest.mark.parametrize(
    ("verdict", "again"),
    [
        (TIMEOUT, True),
        (INVALID, True),
        (rewarded(math.nan), True),
        (rewarded(-0.1), True),
        (rewarded(1.1), True),
        (rewarded(0.0), False),
        (rewarded(1.0), False),
        (SETUP, False),
    ],
)
def test_only_an_ambiguous_verdict_is_given_again(verdict: Verdict, again: bool) -> None:
    assert needs_rerun(verdict) is again


def test_a_label_carries_the_evidence() -> None:
    label = judge(
        evidence(
            End.TIME, rewarded(0.0), limit=StepLimit.TIME, wall_s=9.5, cpu_s=2.5, detail="slept"
        )
    )
    assert label == OutcomeLabel(FAILURE, "budget_time", 0.0, "time", 9.5, 2.5, False, "slept")


EVIDENCE = st.builds(
    Evidence,
    end=st.sampled_from(End),
    failure=st.sampled_from(Failure),
    limit=st.sampled_from(StepLimit),
    starved=st.booleans(),
    actions=st.integers(0, 2),
    tokens=st.integers(0, 2),
    killed_hosts=st.integers(0, 2),
    threshold=st.floats(0, 1),
    verdicts=st.lists(
        st.builds(Verdict, st.sampled_from(VerdictStatus), st.floats()), max_size=2
    ).map(tuple),
)


@given(EVIDENCE)
def test_every_label_is_trainable_as_it_stands(found: Evidence) -> None:
    """Total; a valid outcome has a finite reward in range, an invalid one has none."""
    label = judge(found)
    assert label.cause
    if label.outcome.valid:
        assert label.reward is not None
        assert 0.0 <= label.reward <= 1.0
    else:
        assert label.reward is None


@given(EVIDENCE)
def test_a_failure_of_infrastructure_is_scored_only_when_the_command_killed_hosts(
    found: Evidence,
) -> None:
    label = judge(replace(found, end=End.INFRA))
    assert label.outcome.valid == (found.killed_hosts >= 2)
