"""An evaluation in the audit: clean as it should be, and each way to train on it is found."""

from __future__ import annotations

from typing import Any

from muster.audit import audit
from muster.bias import bias
from muster.run_index import RunIndex
from muster.types import EpisodeKey
from muster.v1 import common_pb2 as pb
from muster.v1 import events_pb2 as ev

Story = Any
HELD = "held-00000"


def evaluation(story: Story, *, found: bool = True, siblings: int = 2) -> None:
    """One group of an evaluation, beside the good run."""
    job = ev.JobRecord(job="held", groups=1, group_size=2, purpose=pb.JOB_PURPOSE_EVALUATE)
    story.add("jobs", job)
    opened = ev.GroupOpened(
        job="held", task="t", group_size=2, opened_unix_s=1.0, purpose=pb.JOB_PURPOSE_EVALUATE
    )
    key = EpisodeKey(story.run, HELD, 0, 0, 1)
    story.add("events", story._event(key, 0, group_opened=opened))
    for sibling in (0, 1):
        story.episode(HELD, sibling)
    story.add("fates", ev.GroupFate(run=story.run, group=HELD, fate=ev.FATE_EVALUATED))
    if found:
        message = ev.EvaluatedGroup(run=story.run, group=HELD, job="held", task="t")
        for number in range(siblings):
            message.siblings.add(sibling=number, outcome=pb.OUTCOME_MODEL_FAILURE)
        story.add("evaluations", message)


def problems(story: Story) -> list[str]:
    return [f"{f.where}: {f.what}" for f in audit(story.record()).problems]


def test_a_run_with_an_evaluation_is_clean_and_adds_up(good: Story) -> None:
    evaluation(good)
    found = audit(good.record())
    assert found.findings == ()
    t = found.totals
    assert (t.groups, t.groups_trained, t.groups_evaluated, t.groups_open) == (3, 2, 1, 0)
    assert (t.siblings_dispatched, t.siblings_trained, t.siblings_evaluated) == (6, 4, 2)


def test_one_that_was_trained_on_is_a_problem(good: Story) -> None:
    evaluation(good)
    good.batch(3, {HELD: [0, 0]})
    assert f"group {HELD}: of an evaluation, but evaluated and in batches [3]" in problems(good)


def test_one_whose_findings_are_lost_is_a_problem(good: Story) -> None:
    evaluation(good, found=False)
    assert problems(good) == [f"group {HELD}: evaluated, but what was found out is lost"]


def test_one_with_a_sibling_short_is_a_problem(good: Story) -> None:
    evaluation(good, siblings=1)
    assert problems(good) == [f"group {HELD}: evaluated with 1 siblings"]


def test_a_group_of_the_trainers_that_was_evaluated_is_a_problem(good: Story) -> None:
    good.opened("job-00002")
    for sibling in (0, 1):
        good.episode("job-00002", sibling)
    good.add("fates", ev.GroupFate(run=good.run, group="job-00002", fate=ev.FATE_EVALUATED))
    assert "group job-00002: evaluated, but its job is for the trainer" in problems(good)


def test_it_is_no_part_of_the_comparison_of_dispatched_and_trained(good: Story) -> None:
    before = bias(RunIndex(good.record()))
    evaluation(good)
    assert bias(RunIndex(good.record())) == before
