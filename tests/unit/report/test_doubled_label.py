"""An attempt that was labelled twice: everywhere the first label counts, as it does in the bank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from muster.audit import count
from muster.explain import of_record
from muster.lane_texts import attempt_lines, marks_of
from muster.repairs import remarks, repairs
from muster.report import report
from muster.run_index import RunIndex
from muster.subject import Kind, Subject, subject
from muster.timeline import timelines
from muster.types import Outcome, OutcomeLabel

Story = Any
G0 = "job-00000"
EPISODE = f"{G0}.0.0"
FIRST = OutcomeLabel(Outcome.INFRA_FAILURE, "host_lost")
SECOND = OutcomeLabel(Outcome.MODEL_FAILURE, "host_starved", 0.0)


@pytest.fixture
def index(story: Story) -> RunIndex:
    """One attempt that was labelled twice."""
    story.job(groups=1)
    story.opened(G0, size=1)
    story.episode(G0, 0, label=FIRST)
    story.label((G0, 0, 0), SECOND)
    return RunIndex(story.record())


VIEWS: dict[str, Callable[[RunIndex], str]] = {
    "explain": lambda index: str(of_record(Subject(Kind.EPISODE, EPISODE), index)),
    "outcome": lambda index: str(index.outcome(G0, 0)),
    "timeline": lambda index: str([s.ended for t in timelines(index, 30.0) for s in t.strips]),
    "lane": lambda index: "\n".join(attempt_lines(index, EPISODE)),
    "marks": lambda index: str([*marks_of(index, G0, 0, 1)]),
    "repairs": lambda index: str(repairs(index, [(G0, 0, 1)])),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_tells_of_the_first_label(view: str, index: RunIndex) -> None:
    shown = VIEWS[view](index)
    assert "host_lost" in shown
    assert "host_starved" not in shown


def test_the_audit_counts_the_first_label(index: RunIndex) -> None:
    assert count(index).outcomes == {"infra_failure": 1}


def test_the_report_counts_the_first_label(index: RunIndex) -> None:
    assert report(index.record).totals.outcomes == {"infra_failure/host_lost": 1}


def test_only_a_first_label_is_remarked_on(index: RunIndex) -> None:
    assert not [line for line in remarks(index) if "starved" in line]


def test_the_first_label_decides_whether_another_attempt_may_follow(index: RunIndex) -> None:
    assert subject([f"{G0}.0.1"], index) == Subject(Kind.EPISODE, f"{G0}.0.1")
