"""Repairs by cause, flaky verdicts by task, and the remarks that name what to mend."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from muster.repairs import REMARKS_MAX, flaky_by_task, remarks, repairs
from muster.report import report
from muster.run_index import RunIndex
from muster.types import Outcome, OutcomeLabel

G0 = "job-00000"
LOST = OutcomeLabel(Outcome.INFRA_FAILURE, "host_lost")
STARVED = OutcomeLabel(Outcome.INFRA_FAILURE, "host_starved")
FAILED = OutcomeLabel(Outcome.MODEL_FAILURE, "not_passed", 0.0)
NO_VERDICT = OutcomeLabel(Outcome.MODEL_FAILURE, "verifier_invalid", 0.0)
Story = Any


def told(story: Story) -> list[str]:
    return remarks(RunIndex(story.record()))


def test_repairs_and_replays_are_counted_by_cause(story: Story) -> None:
    story.job(groups=1)
    story.opened(G0)
    story.episode(G0, 0, 0, label=LOST)
    story.episode(G0, 0, 1, label=STARVED)
    story.episode(G0, 0, 2)
    story.step((G0, 1, 0), 0)
    story.restored((G0, 1, 0))
    found = repairs(RunIndex(story.record()))
    assert (found.attempts, found.attempts_by_cause) == (2, {"host_lost": 1, "host_starved": 1})
    assert (found.replays, found.replays_by_reason, found.turns_replayed) == (
        1,
        {"host_lost": 1},
        1,
    )


def test_a_batch_counts_only_what_led_to_its_members(story: Story) -> None:
    story.job(groups=2)
    for group in (G0, "job-00001"):
        story.opened(group, size=1)
        story.episode(group, 0, 0, label=LOST)
        story.episode(group, 0, 1)
    story.train(1, {G0: [1]})
    found = report(story.record())
    assert found.batches[0].repair_causes == {"host_lost": 1}
    assert found.totals.repair_causes == {"host_lost": 2}


def test_flaky_verifiers_stand_by_task(story: Story) -> None:
    story.job(groups=1)
    story.opened(G0)
    story.episode(G0, 0, label=replace(FAILED, flaky=True))
    story.episode(G0, 1)
    assert flaky_by_task(RunIndex(story.record())) == {"t": 1}
    assert any("task t: its verifier gave two different verdicts" in line for line in told(story))


def test_a_verifier_that_fails_every_sibling_is_suspected(story: Story) -> None:
    story.job(groups=1)
    story.opened(G0)
    for sibling in (0, 1):
        story.episode(G0, sibling, label=NO_VERDICT)
    assert told(story)[0].startswith(f"task t: no sibling of group {G0} got a verdict")


def test_a_verifier_that_fails_one_sibling_is_not(story: Story) -> None:
    story.job(groups=1)
    story.opened(G0)
    story.episode(G0, 0, label=NO_VERDICT)
    story.episode(G0, 1)
    assert not any("got a verdict" in line for line in told(story))


def test_a_group_without_variance_is_remarked_once_it_is_whole(story: Story) -> None:
    story.job(groups=1)
    story.opened(G0)
    story.episode(G0, 0)
    assert told(story) == []
    story.episode(G0, 1)
    [line] = told(story)
    assert f"1 groups without variance (rewards 0): they carry no gradient ({G0})" in line


def test_the_batch_names_its_groups_without_variance(story: Story) -> None:
    story.job(groups=2)
    story.opened(G0)
    for sibling in (0, 1):
        story.episode(G0, sibling)
    story.group("job-00001")
    story.train(1, {G0: [0, 0], "job-00001": [0, 0]})
    only = report(story.record()).batches[0]
    assert (only.groups_zero_variance, only.groups_with_variance) == ((G0,), 1)


def test_starved_hosts_are_told_with_the_setting(story: Story) -> None:
    story.job(groups=1)
    story.opened(G0)
    story.episode(G0, 0, label=STARVED)
    assert any("sandbox.boxes_max" in line for line in told(story))


def test_many_remarks_are_cut_and_the_rest_is_counted(story: Story) -> None:
    story.job(groups=99)
    for number in range(REMARKS_MAX + 5):
        group = f"job-{number:05d}"
        story.opened(group)
        for sibling in (0, 1):
            story.episode(group, sibling, label=NO_VERDICT)
    assert told(story)[-1] == f"and {len(told(story)) + 5} more remarks" or len(told(story)) == 51
