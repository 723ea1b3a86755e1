"""Figures of the report, each from a run told entry by entry."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from msgspec.structs import replace

from muster.audit import audit
from muster.config import load_config
from muster.engines import Engine, Stretch
from muster.entries import Publication, PublicationTimes, Step
from muster.errors import NotFound
from muster.report import (
    PUBLICATION,
    SETTINGS,
    TRAINER,
    BatchReport,
    Bottleneck,
    _decoding_share,
    as_json,
    bottleneck,
    report,
)
from muster.split import PARTS
from muster.types import Outcome, OutcomeLabel
from muster.v1 import events_pb2 as ev

G0, G1 = "job-00000", "job-00001"
LOST = OutcomeLabel(Outcome.INFRA_FAILURE, "host_lost")
Story = Any


def batches(story: Story) -> list[BatchReport]:
    return list(report(story.record()).batches)


def test_the_first_batch_counts_from_the_submission(good: Story) -> None:
    first = batches(good)[0]  # submitted at 0, asked at 5, complete at 16
    assert (first.time_to_trainable_batch_s, first.cold) == (16, True)


def test_later_batches_count_from_the_trainers_asking(good: Story) -> None:
    second = batches(good)[1]  # asked at 29, complete at 36
    assert (second.time_to_trainable_batch_s, second.cold) == (7, False)
    assert (second.interval_s, second.think_s) == (20, 13)


def test_a_trainer_that_asked_before_the_submission_is_not_counted(good: Story) -> None:
    good.job("late", groups=1, at=50)
    good.opened("late-00000", job="late")
    for sibling in (0, 1):
        good.episode("late-00000", sibling, version=2, at=60)
    good.train(3, {"late-00000": [0, 0]}, asked=40, complete=66)
    third = batches(good)[2]
    assert (third.time_to_trainable_batch_s, third.cold) == (16, True)


def test_a_batch_that_waited_for_the_trainer_took_no_time(good: Story) -> None:
    good.job("more", groups=1, at=1)
    good.opened("more-00000", job="more")
    for sibling in (0, 1):
        good.episode("more-00000", sibling, at=37)
    good.train(3, {"more-00000": [0, 0]}, asked=90, complete=43)
    third = batches(good)[2]
    assert third.time_to_trainable_batch_s == 0
    assert set(third.split.values()) == {0}


def test_the_split_sums_to_the_whole(good: Story) -> None:
    """Both siblings: launched at 10, two turns of 1 s decode and 1 s tool, verified for 1 s."""
    first = batches(good)[0]
    assert {k: v for k, v in first.split.items() if v} == {
        "queue": 10,
        "decode": 2,
        "tool": 2,
        "verify": 1,
        "transfer": 1,
    }
    assert math.fsum(first.split.values()) == first.time_to_trainable_batch_s


def test_an_abandoned_attempt_is_part_of_its_siblings_time(story: Story) -> None:
    story.job(groups=1)
    story.opened(G0)
    story.episode(G0, 0, 0, turns=1, label=LOST, at=0)  # 0–3
    story.episode(G0, 0, 1, turns=1, at=5)  # 5–8
    story.episode(G0, 1, turns=1, at=0)  # 0–3
    story.train(1, {G0: [1, 0]}, asked=0, complete=8)
    only = batches(story)[0]
    assert only.split["decode"] == 2
    assert only.split["queue"] == 2
    assert only.straggler_tail_s == 0  # nine tenths of two are both
    assert only.repairs == 1


def test_outcomes_are_counted_by_cause_for_the_attempts_that_count(story: Story) -> None:
    story.job(groups=1)
    story.opened(G0)
    story.episode(G0, 0, 0, label=LOST)
    story.episode(G0, 0, 1, label=OutcomeLabel(Outcome.MODEL_SUCCESS, "passed", 1.0))
    story.episode(G0, 1, label=OutcomeLabel(Outcome.MODEL_FAILURE, "budget_turns", 0.5))
    story.train(1, {G0: [1, 0]})
    only = batches(story)[0]
    assert only.outcomes == {"model_success/passed": 1, "model_failure/budget_turns": 1}
    assert (only.pass_rate, only.reward_mean, only.groups_with_variance) == (0.5, 0.75, 1)
    assert report(story.record()).totals.outcomes["infra_failure/host_lost"] == 1


def test_invalid_siblings_are_outside_pass_rate_and_reward(story: Story) -> None:
    story.job(groups=1)
    story.opened(G0)
    story.episode(G0, 0, label=LOST)
    story.episode(G0, 1, label=OutcomeLabel(Outcome.MODEL_SUCCESS, "passed", 1.0))
    story.train(1, {G0: [0, 0]})
    only = batches(story)[0]
    assert (only.pass_rate, only.reward_mean, only.groups_with_variance) == (1.0, 1.0, 0)


def test_lag_is_counted_from_the_first_token_along_the_lineage(story: Story) -> None:
    """Numbers have a hole: 1 → 5 → 6 is a lag of two, not of five."""
    story.job(groups=1)
    for version, parent in ((0, -1), (1, 0), (5, 1), (6, 5)):
        story.version(version, parent)
    story.opened(G0)
    story.turn((G0, 0, 0), 0, version=1)
    story.turn((G0, 0, 0), 1, version=6)
    story.end((G0, 0, 0), 2)
    story.label((G0, 0, 0))
    story.episode(G0, 1, version=6)
    story.batch(1, {G0: [0, 0]}, version=5)
    story.version(7, 6, step=1)
    only = batches(story)[0]
    assert (only.lag_mean, only.lag_max) == (1.0, 2)
    assert audit(story.record()).ok


def test_lag_before_the_step_is_counted_from_the_published_version(story: Story) -> None:
    story.job(groups=1)
    for version in range(3):
        story.version(version, version - 1)
    story.opened(G0)
    for sibling in (0, 1):
        story.episode(G0, sibling, version=1)
    story.batch(1, {G0: [0, 0]}, version=2)
    assert batches(story)[0].lag_max == 1


def test_tokens_and_turns_are_those_of_the_members(good: Story) -> None:
    first = batches(good)[0]
    assert (first.turns, first.tokens_prompt, first.tokens_cached, first.tokens_sampled) == (
        4,
        80,
        40,
        20,
    )


def test_the_step_and_its_publications_stand_with_the_batch(good: Story) -> None:
    publications = [
        ev.PublicationReport(replica=f"e{n}", latency_s=2.0 + n, pause_s=0.5, token_gap_s=0.6)
        for n in range(2)
    ]
    good.job("more", groups=1, at=1)
    good.opened("more-00000", job="more")
    for sibling in (0, 1):
        good.episode("more-00000", sibling, version=2)
    good.train(3, {"more-00000": [0, 0]}, publications=publications)
    found = batches(good)[2].trained
    assert found is not None
    assert (found.version, found.parent, found.step.loss, found.step_kl) == (3, 2, 0.5, 0.001)
    assert [p.replica for p in found.publications] == ["e0", "e1"]
    assert [p.latency_s for p in found.publications] == [2.0, 3.0]


def test_a_frozen_batch_has_no_step_yet(story: Story) -> None:
    story.job(groups=1)
    story.group(G0)
    story.batch(1, {G0: [0, 0]})
    only = batches(story)[0]
    assert (only.stage, only.trained) == ("frozen", None)


def test_totals_are_those_of_the_run(good: Story) -> None:
    good.job("more", groups=2, at=1)
    good.opened("more-00000", job="more")
    good.opened("more-00001", job="more")
    good.fate("more-00000", reason="zero_variance")
    t = report(good.record()).totals
    assert (t.jobs, t.groups, t.groups_trained, t.groups_filtered, t.groups_open) == (2, 4, 2, 1, 1)
    assert t.filtered_reasons == {"zero_variance": 1}
    assert (t.trajectories, t.tokens_sampled, t.versions_published, t.wall_s) == (4, 40, 3, 36)
    assert t.cached_token_share == t.tokens_cached / t.tokens_prompt > 0


def test_each_replica_has_its_turns_and_its_share_of_cached_tokens(good: Story) -> None:
    record = good.record()
    names = {turn.replica for turn in record.turns}
    found = {engine.replica: engine for engine in report(record).engines}
    assert {*found} == names
    for name in names:
        mine = [turn for turn in record.turns if turn.replica == name]
        prompts, cached = (sum(t.prompt_tokens for t in mine), sum(t.cached_tokens for t in mine))
        assert (found[name].turns, found[name].cached_token_share) == (len(mine), cached / prompts)


def test_one_batch_can_be_chosen(good: Story) -> None:
    assert [b.step for b in report(good.record(), only=2).batches] == [2]


def test_a_batch_that_is_not_there_is_named(good: Story) -> None:
    with pytest.raises(NotFound) as caught:
        report(good.record(), only=9)
    assert (caught.value.field, caught.value.value) == ("batch", "9")
    assert "1 to 2" in caught.value.way_out


def test_an_empty_run_has_a_report(story: Story) -> None:
    found = report(story.record())
    assert (found.batches, found.bottleneck) == ((), None)


def with_split(base: BatchReport, think: float | None = None, **parts: float) -> BatchReport:
    split = dict.fromkeys(PARTS, 0.0) | parts
    return replace(
        base, split=split, time_to_trainable_batch_s=math.fsum(split.values()), think_s=think
    )


@pytest.mark.parametrize("part", PARTS)
def test_the_bottleneck_is_the_largest_part_over_all_batches(good: Story, part: str) -> None:
    other = "decode" if part != "decode" else "tool"
    base = batches(good)[0]
    both = [with_split(base, **{part: 5.0, other: 4.0}), with_split(base, **{part: 1.0})]
    found = bottleneck(both)
    assert found == Bottleneck(part, 0.6, *SETTINGS[part])


@pytest.mark.parametrize("part", [*PARTS, TRAINER, PUBLICATION])
def test_the_named_setting_exists(part: str) -> None:
    config = load_config(None, {})
    section, _, key = SETTINGS[part][0].partition(".")
    owner = config.sections.get(section) or getattr(config, section)
    assert key in type(owner).model_fields


def test_the_trainer_is_the_bottleneck_when_batches_wait_for_it(good: Story) -> None:
    base = batches(good)[0]
    found = bottleneck([with_split(base, think=9.0, decode=1.0)])
    assert found is not None
    assert (found.part, found.share) == ("trainer", 0.9)


def test_weights_on_their_way_are_told_from_the_training(good: Story) -> None:
    """9 s between two batches, of which the slower of two replicas took 7 to get the weights."""
    base = batches(good)[0]
    assert base.trained is not None
    on_the_way = tuple(
        Publication(f"e{n}", seconds, 0, 0, 0, 0, 0, 0, "") for n, seconds in enumerate((3.0, 7.0))
    )
    published = replace(base, trained=replace(base.trained, publications=on_the_way))
    found = bottleneck([with_split(published, decode=1.0), with_split(published, think=9.0)])
    assert found == Bottleneck("publication", 0.7, *SETTINGS["publication"])


def test_what_was_trained_beside_a_publication_did_not_wait_for_it(good: Story) -> None:
    base = batches(good)[0]
    assert base.trained is not None
    slow = (Publication("e0", 7.0, 0, 0, 0, 0, 0, 0, ""),)
    beside = PublicationTimes(took_s=7.0, trained_meanwhile_s=6.0)
    published = replace(base, trained=replace(base.trained, publications=slow, times=beside))
    found = bottleneck([with_split(published, decode=1.0), with_split(published, think=9.0)])
    assert found is not None
    assert (found.part, found.share) == ("trainer", 0.8)


@pytest.mark.parametrize(
    ("ended", "took", "share"), [(14.0, 2.0, 0.5), (30.0, 2.0, 0.0), (0.0, 2.0, None)]
)
def test_the_share_of_training_beside_decoding(
    ended: float, took: float, share: float | None
) -> None:
    """Two replicas: one decodes from 10 to 14, the other never."""
    ran = [
        Engine("e0", 50.0, (Stretch(10, 14, 25.0, 2, 0), Stretch(14, 40, 0.0, 2, 0))),
        Engine("e1", 50.0, ()),
    ]
    step = Step(1, 0, 0, 0, 0, 0, 0, 0, 0, 0, took, ended)
    assert _decoding_share(step, ran) == share


def test_a_busy_trainer_is_not_blamed_while_it_waits_longer_than_it_works(good: Story) -> None:
    base = batches(good)[0]
    found = bottleneck([with_split(base, think=6.0, decode=4.0, tool=3.0)])
    assert found is not None
    assert found.part == "decode"


def test_json_is_one_document_of_plain_ascii(good: Story) -> None:
    good.job("\x1b[2Jjob\x9b\u202e", groups=1)
    good.opened("x", job="\x1b[2Jjob\x9b\u202e😀")
    good.fate("x", reason="\x1b]0;pwn\x07<script>\x9b\x7f😀")
    for found in (report(good.record()), audit(good.record())):
        text = as_json(found)
        assert text.isascii()
        assert all(c >= " " or c == "\n" for c in text)
        assert "\x7f" not in text
        assert json.loads(text)["run"] == "r"
    assert "😀" in next(
        iter(json.loads(as_json(report(good.record())))["totals"]["filtered_reasons"])
    )
