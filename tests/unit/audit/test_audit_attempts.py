"""Attempts, intents, boxes and owners: a sound chain passes, each way to break it is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from muster.audit import audit
from muster.types import Outcome, OutcomeLabel
from muster.v1 import common_pb2 as common
from muster.v1 import events_pb2 as ev

LOST = OutcomeLabel(Outcome.INFRA_FAILURE, "host_lost")
FAILED = OutcomeLabel(Outcome.MODEL_FAILURE, "not_passed", 0.0)
G0 = "job-00000"
E0 = (G0, 0, 0)
Story = Any


def problems(story: Story) -> list[str]:
    return [f"{f.where}: {f.what}" for f in audit(story.record()).problems]


@pytest.fixture
def begun(story: Story) -> Story:
    """A group whose first sibling has taken one step in box b0."""
    story.job(groups=1)
    story.opened(G0)
    story.step(E0, 0)
    return story


def test_a_step_that_is_running_is_no_problem(begun: Story) -> None:
    begun.step(E0, 1, finished=False)
    assert problems(begun) == []


def test_a_step_that_the_attempts_end_cut_off_is_no_problem(begun: Story) -> None:
    begun.step(E0, 1, finished=False)
    begun.end(E0, 1)
    begun.label(E0, LOST)
    assert problems(begun) == []


def test_an_episode_goes_on_in_a_restored_box_under_a_new_owner(begun: Story) -> None:
    begun.owner = 2
    begun.step(E0, 1, finished=False)
    begun.restored(E0)
    begun.drop(begun.step(E0, 1, box="b1", host="h1")[0])  # the same intent: only its result
    begun.end(E0, 2)
    begun.label(E0, replace(FAILED, replays=1))
    assert problems(begun) == []


def test_the_step_in_flight_when_the_box_died_may_be_its_last(begun: Story) -> None:
    begun.restored(E0, turns=1)
    begun.step(E0, 1, box="b1", host="h1")
    assert problems(begun) == []


def again_intended(story: Story) -> None:
    story.again(story.step(E0, 1)[0])


def no_intent(story: Story) -> None:
    intent, _ = story.step(E0, 1)
    story.drop(intent)


def no_result(story: Story) -> None:
    story.step(E0, 1, finished=False)
    story.step(E0, 2)


def intent_after_result(story: Story) -> None:
    intent = story.step(E0, 1)[0]
    story.drop(intent)
    story.again(intent)


def intent_after_end(story: Story) -> None:
    story.end(E0, 1)
    story.label(E0)
    story.step(E0, 1, finished=False)


def another_command(story: Story) -> None:
    story.drop(story.step(E0, 1, "rm x")[1], story.step(E0, 1, "rm y")[0])


def silent_move(story: Story) -> None:
    story.step(E0, 1, box="b9")


def back_to_the_lost_box(story: Story) -> None:
    story.restored(E0)
    story.step(E0, 1)


def replay_twice(story: Story) -> None:
    story.again(story.restored(E0))


def replay_after_end(story: Story) -> None:
    story.end(E0, 1)
    story.label(E0, replace(FAILED, replays=1))
    story.restored(E0)


def replay_of_too_little(story: Story) -> None:
    story.step(E0, 1)
    story.step(E0, 2)
    story.restored(E0, turns=1)


def replay_not_counted(story: Story) -> None:
    story.restored(E0)
    story.end(E0, 1)
    story.label(E0)


def turn_twice(story: Story) -> None:
    story.again(story.step(E0, 1)[1])


def woken_owner(story: Story) -> None:
    """A router that was paused intends a step after its standby did."""
    story.owner = 2
    story.step(E0, 1)
    story.owner = 1
    story.step(E0, 2, finished=False)


def woken_owner_restores(story: Story) -> None:
    story.owner = 2
    story.step(E0, 1)
    story.owner = 1
    story.restored(E0, turns=2)


def repaired_too_often(story: Story) -> None:
    opened = ev.GroupOpened(job="job", task="t", group_size=1)
    opened.policy.CopyFrom(common.JobPolicy(repairs_max=1))
    key = common.EpisodeKey(run="r", group="job-00001", owner_epoch=1)
    story.add("events", ev.TrajectoryEvent(episode=key, group_opened=opened))
    for attempt in range(3):
        story.episode("job-00001", 0, attempt, label=LOST)


def unlabelled_former(story: Story) -> None:
    """The former attempt is unknown but for its label."""
    story.label((G0, 1, 0), LOST)
    story.episode(G0, 1, 1)


BREAKS = [
    (again_intended, f"episode {G0}.0.0: the step of turn 1 was intended 2 times"),
    (no_intent, f"episode {G0}.0.0: the step of turn 1 ran without a recorded intent"),
    (no_result, "the step of turn 1 has no result, yet later ones were run"),
    (intent_after_result, "the step of turn 1 was intended after it had ended"),
    (intent_after_end, "the step of turn 1 was intended after the end"),
    (another_command, "turn 1 ended with another command than intended"),
    (silent_move, "turn 1 was in box b9 of h0, the episode was in b0 of h0, without a replay"),
    (back_to_the_lost_box, "turn 1 was in box b0 of h0, the episode was in b1 of h1, without"),
    (replay_twice, "its replays are numbered 1, 1"),
    (replay_after_end, "a box was restored after the end"),
    (replay_of_too_little, "replay 1: 1 turns replayed of 3"),
    (replay_not_counted, "1 replays are recorded, its label counts 0"),
    (turn_twice, "turn 1 stands 2 times"),
    (woken_owner, "written by owner epoch 1 after 2 had taken over"),
    (woken_owner_restores, "written by owner epoch 1 after 2 had taken over"),
    (repaired_too_often, "sibling job-00001.0: was repaired 2 times, its job allows 1"),
    (unlabelled_former, "begun while attempt 0 had not ended"),
]


@pytest.mark.parametrize(("harm", "told"), BREAKS, ids=[harm.__name__ for harm, _ in BREAKS])
def test_each_breach_is_found(begun: Story, harm: Callable[[Story], None], told: str) -> None:
    assert problems(begun) == []
    harm(begun)
    assert any(told in line for line in problems(begun)), problems(begun)
