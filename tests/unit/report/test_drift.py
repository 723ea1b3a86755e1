"""Drift in the record: bounds against what was measured, revisions of batches, their fates."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from muster.audit import audit
from muster.drift import drift
from muster.explain import of_record
from muster.figures import Drift
from muster.report import report
from muster.report_rows import lines, rows
from muster.run_index import RunIndex
from muster.subject import Kind, Subject
from muster.v1 import events_pb2 as ev
from tests.unit.conftest import Story

G = [f"job-{number:05d}" for number in range(5)]


def told(story: Story, group: str, reason: str, **kls: float) -> None:
    story.add(
        "fates",
        ev.GroupFate(run=story.run, group=group, fate=ev.FATE_FILTERED, reason=reason, **kls),
    )


def batch(story: Story, stage: ev.BatchStage.ValueType, *groups: str, **fields: object) -> None:
    members = [ev.BatchMember(group=group, attempts=[0, 0]) for group in groups]
    record = ev.BatchRecord(
        run=story.run,
        step=1,
        stage=stage,
        members=members,
        asked_unix_s=10.0,
        complete_unix_s=15.0,
        trainer_epoch=1,
        **fields,  # type: ignore[arg-type]
    )
    story.add("batches", record)


FROZEN, RETURNED, TRAINED = (
    ev.BATCH_STAGE_FROZEN,
    ev.BATCH_STAGE_RETURNED,
    ev.BATCH_STAGE_TRAINED,
)
BACK = {"revision": 1, "returned": [G[1]], "groups": 2}


@pytest.fixture
def revised(story: Story) -> Story:
    """Group 1 of the first batch was given back, group 2 came in its place; 3 and 4 were refused by
    the bank, and 4 of them scored all the same."""
    story.job("job", groups=5)
    for group in G:
        story.group(group)
    batch(story, FROZEN, G[0], G[1])
    batch(story, RETURNED, G[0], **BACK)
    told(story, G[1], "returned_kl", measured_kl=0.3)
    batch(story, FROZEN, G[0], G[2], **BACK)
    made = ev.StepReport(step=1, groups_returned=1, predicted_kl=0.04, measured_kl=0.01)
    version = ev.PolicyVersionRecord(
        version=1, parent=0, digest="d1", stage=ev.VERSION_STAGE_DURABLE, step=made
    )
    story.add("versions", version)
    batch(story, TRAINED, G[0], G[2], **BACK)
    story.fate(G[0], 1)
    story.fate(G[2], 1)
    told(story, G[3], "stale_kl", predicted_kl=0.5)
    told(story, G[4], "stale_kl", predicted_kl=0.4, scored_kl=0.05)
    return story


def test_bounds_stand_beside_what_was_measured(revised: Story) -> None:
    assert drift(RunIndex(revised.record())) == Drift(
        trained_predicted_kl=0.04,
        trained_measured_kl=0.01,
        refused=2,
        returned=1,
        calibrated=1,
        calibrated_predicted_kl=0.4,
        calibrated_scored_kl=0.05,
    )
    found = report(revised.record())
    table = dict(rows(found.batches))
    assert table["drift predicted / measured (KL)"] == ["0.04 / 0.01"]
    assert table["groups given back"] == ["1"]
    assert table["step KL"] == ["–"]  # nobody measured it
    text = " ".join(lines(found))
    assert "2 by their bound, 0 by a replica's score, 1 given back by the trainer" in text
    assert "calibration: 1 of those refused" in text
    assert "0.4 predicted, 0.05 scored" in text


def test_a_revised_batch_is_clean(revised: Story) -> None:
    found = audit(revised.record())
    assert found.problems == ()
    assert any("1 groups given back so far" in f.what for f in found.findings)


def test_a_fate_says_on_which_figures_it_was_decided(revised: Story) -> None:
    index = RunIndex(revised.record())
    cases = {
        G[1]: "filtered: returned_kl (measured by the trainer 0.3 nats per token)",
        G[3]: "filtered: stale_kl (at most 0.5 nats per token)",
        G[4]: "filtered: stale_kl (at most 0.4, scored 0.05 nats per token)",
    }
    for group, state in cases.items():
        assert of_record(Subject(Kind.GROUP, group), index)[0].state == state


def _without_short(story: Story) -> None:
    story.messages = [m for m in story.messages if not _is(m, RETURNED, 1)]


def _is(message: object, stage: int, revision: int) -> bool:
    if getattr(message, "stream", "") != "batches":
        return False
    found = ev.BatchRecord.FromString(message.data)  # type: ignore[attr-defined]
    return (found.stage, found.revision) == (stage, revision)


def _old_one_trained(story: Story) -> None:
    batch(story, TRAINED, G[0], G[1])


def _another_stays(story: Story) -> None:
    _without_short(story)
    batch(story, RETURNED, G[2], **BACK)


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (_old_one_trained, "revision 0 was trained, 1 is the newest"),
        (_another_stays, "what stays is not what was not given back"),
    ],
)
def test_a_wrong_revision_is_found(
    revised: Story, harm: Callable[[Story], None], problem: str
) -> None:
    harm(revised)
    assert any(problem in f.what for f in audit(revised.record()).problems)


def test_a_batch_that_lacks_groups_holds_only_what_stays(story: Story) -> None:
    story.job("job", groups=2)
    for group in G[:2]:
        story.group(group)
    batch(story, FROZEN, G[0], G[1])
    batch(story, RETURNED, G[0], **BACK)
    told(story, G[1], "returned_kl")
    assert audit(story.record()).problems == ()
    assert report(story.record()).batches[0].stage == "returned"
