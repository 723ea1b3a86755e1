"""What an audit lets pass, and what it says without calling it a problem."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest

from muster.audit import audit
from muster.audit_view import render_audit
from muster.record import StreamState, decode
from muster.types import Outcome, OutcomeLabel
from muster.v1 import events_pb2 as ev
from muster.view import console

LOST = OutcomeLabel(Outcome.INFRA_FAILURE, "host_lost")
G0, G1 = "job-00000", "job-00001"
Story = Any


def problems(story: Story) -> list[str]:
    return [f"{f.where}: {f.what}" for f in audit(story.record()).problems]


def notes(story: Story) -> list[str]:
    return [f"{f.where}: {f.what}" for f in audit(story.record()).findings]


def shown(story: Story) -> str:
    out = io.StringIO()
    console(out).print(render_audit(audit(story.record())))
    return out.getvalue()


def test_a_repair_after_a_lost_host_is_linked_and_counted(story: Story) -> None:
    story.job(groups=1)
    story.opened(G0)
    story.episode(G0, 0, 0, label=LOST)
    story.episode(G0, 0, 1)
    story.episode(G0, 1)
    story.train(1, {G0: [1, 0]})
    assert problems(story) == []
    assert audit(story.record()).totals.siblings_repaired == 1


def test_a_new_owner_goes_on_with_an_attempt(story: Story) -> None:
    story.job(groups=1)
    story.opened(G0)
    story.turn((G0, 0, 0), 0)
    story.owner = 2
    story.turn((G0, 0, 0), 1)
    story.end((G0, 0, 0), 2)
    story.label((G0, 0, 0))
    assert problems(story) == []
    assert audit(story.record()).totals.attempts_abandoned == 0


def test_what_still_runs_is_not_called_abandoned(story: Story) -> None:
    story.job(groups=1)
    story.opened(G0)
    story.episode(G0, 0)
    story.turn((G0, 1, 0), 0)
    totals = audit(story.record()).totals
    assert (totals.attempts_finished, totals.attempts_running, totals.attempts_abandoned) == (
        (1, 1, 0)
    )
    assert "1 finished + 1 running + 0 abandoned" in shown(story)
    story.fate(G0, reason="cancelled")
    totals = audit(story.record()).totals
    assert (totals.attempts_running, totals.attempts_abandoned) == (0, 1)


def test_invalid_siblings_of_a_trained_group_need_no_ancestry(story: Story) -> None:
    story.job(groups=1)
    story.opened(G0)
    story.episode(G0, 0, version=77, label=LOST)
    story.episode(G0, 1)
    story.train(1, {G0: [0, 0]})
    assert problems(story) == []


def test_a_return_to_an_old_checkpoint_is_no_problem(good: Story) -> None:
    """Step 2 is trained again, from version 1, as version 3; the batch is the same."""
    good.version(3, 1, step=2)
    good.batch(2, {G1: [0, 0]}, trained=True, version=1)
    assert problems(good) == []
    assert any("frozen 1 times, trained 2 times, unchanged" in line for line in notes(good))


@pytest.mark.parametrize("asked", [0.5, 10.0])
def test_a_batch_that_was_brought_back_keeps_what_was_filtered_meanwhile(
    story: Story, asked: float
) -> None:
    """Entries of a story are of second 1: what was asked for later is no batch that was lost."""
    story.job(groups=1)
    story.opened(G0)
    story.episode(G0, 0)
    story.episode(G0, 1)
    story.fate(G0, reason="abandoned_version 1 (sibling 0 turn 0)")
    story.batch(1, {G0: [0, 0]}, asked=asked)
    story.version(1, 0, step=1)
    story.batch(1, {G0: [0, 0]}, trained=True, asked=asked)
    lost = f"group {G0}: filtered while the record of batch 1, which has it, was lost"
    if asked < 1:
        assert problems(story) == []
        assert lost in notes(story)
    else:
        assert problems(story)[:2] == [
            f"group {G0}: filtered, but stands in batch 1",
            f"group {G0}: trained in batch 1, but has no such fate",
        ]


WHY_OPEN = [
    (lambda s: None, "siblings not finished: 0, 1"),
    (lambda s: s.episode(G0, 0), "siblings not finished: 1"),
    (
        lambda s: (s.episode(G0, 0, label=LOST), s.episode(G0, 1)),
        "siblings to be repaired or judged: 0 (host_lost)",
    ),
    (lambda s: (s.episode(G0, 0), s.episode(G0, 1)), "complete, waits in the bank for a trainer"),
    (
        lambda s: (s.episode(G0, 0), s.episode(G0, 1), s.batch(1, {G0: [0, 0]})),
        "in batch 1, which is not yet acknowledged",
    ),
    (lambda s: s.add("jobs", ev.JobRecord(job="job", cancelled=True)), "its job job was cancelled"),
]


@pytest.mark.parametrize(("more", "why"), WHY_OPEN, ids=[why for _, why in WHY_OPEN])
def test_an_open_group_has_a_named_reason(
    story: Story, more: Callable[[Story], object], why: str
) -> None:
    story.job(groups=1)
    story.opened(G0)
    more(story)
    assert problems(story) == []
    assert notes(story) == [f"group {G0}: open: {why}"]


def test_a_filtered_group_counts_as_filtered(story: Story) -> None:
    story.job(groups=1)
    story.group(G0)
    story.fate(G0, reason="zero_variance")
    found = audit(story.record())
    assert found.ok
    assert (found.totals.groups_filtered, found.totals.siblings_filtered) == (1, 2)


def test_a_filtered_group_may_have_a_replacement_but_no_more(story: Story) -> None:
    story.job(groups=1)
    story.group(G0)
    story.fate(G0, reason="zero_variance")
    story.group(f"{G0[:-1]}1")
    assert audit(story.record()).ok
    story.group(f"{G0[:-1]}2")
    assert "3 groups opened, 1 asked, 1 replaced" in problems(story)[0]


def test_what_a_cancelled_job_left_unfinished_is_no_problem(story: Story) -> None:
    story.job(groups=1)
    story.opened(G0)
    story.episode(G0, 0)
    story.add("jobs", ev.JobRecord(job="job", groups=1, group_size=2, cancelled=True))
    story.fate(G0, reason="job_cancelled")
    assert problems(story) == []


def test_a_deletion_is_found_by_the_servers_own_count(good: Story) -> None:
    states = [StreamState("events", added=10, length=9, max_deleted="1000-4")]
    found = audit(decode("r", good.messages, states))
    assert [f.what for f in found.problems] == ["an entry was deleted (newest: 1000-4)"]


def test_trimming_is_a_note(good: Story) -> None:
    found = audit(decode("r", good.messages, [StreamState("events", added=10, length=9)]))
    assert found.ok
    assert [f.what for f in found.findings] == ["the oldest 1 entries were trimmed"]


def test_problems_come_first(good: Story) -> None:
    good.job("more", groups=1)
    good.opened("more-00000", job="more")
    good.fate(G0, reason="zero_variance")
    severities = [f.severity for f in audit(good.record()).findings]
    assert severities == sorted(severities, reverse=True)
    assert set(severities) == {"problem", "note"}
