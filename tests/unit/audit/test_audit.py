"""Each promise of the audit: a clean run passes, each way to break it is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from muster.audit import audit
from muster.streams import Received
from muster.types import Outcome, OutcomeLabel
from muster.v1 import events_pb2 as ev

LOST = OutcomeLabel(Outcome.INFRA_FAILURE, "host_lost")
G0 = "job-00000"
Story = Any


def problems(story: Story) -> list[str]:
    return [f"{f.where}: {f.what}" for f in audit(story.record()).problems]


def find(story: Story, stream: str, episode: str = "", kind: str = "") -> Any:
    """The first entry of a stream, of an episode, of a kind of event."""
    for message in story.messages:
        if message.stream != stream:
            continue
        if stream in ("events", "outcomes"):
            pb: Any = (ev.TrajectoryEvent if stream == "events" else ev.OutcomeLabel).FromString(
                message.data
            )
            key = pb.episode
            if episode and episode != f"{key.group}.{key.sibling}.{key.attempt}":
                continue
            if kind and pb.WhichOneof("event") != kind:
                continue
        return message
    raise LookupError(stream)


def test_a_good_run_is_clean_and_adds_up(good: Story) -> None:
    found = audit(good.record())
    assert found.findings == ()
    t = found.totals
    assert (t.groups, t.groups_trained, t.groups_filtered, t.groups_open) == (2, 2, 0, 0)
    assert (t.siblings_dispatched, t.siblings_trained, t.siblings_open) == (4, 4, 0)
    assert (t.attempts, t.attempts_finished, t.attempts_abandoned) == (4, 4, 0)
    assert (t.batches_frozen, t.batches_trained, t.siblings_repaired) == (2, 2, 0)
    assert t.outcomes == {"model_failure": 2, "model_success": 2}


def test_an_empty_run_is_clean(story: Story) -> None:
    assert audit(story.record()).ok


def duplicate(stream: str, episode: str = "", kind: str = "") -> Callable[[Story], None]:
    return lambda story: story.again(find(story, stream, episode, kind))


def lose(stream: str, episode: str = "", kind: str = "") -> Callable[[Story], None]:
    return lambda story: story.drop(find(story, stream, episode, kind))


def late_turn(story: Story) -> None:
    story.turn((G0, 0, 0), 2)


def late_same_turn(story: Story) -> None:
    story.again(find(story, "events", f"{G0}.0.0", "turn_finished"))


def shuffled_seq(story: Story) -> None:
    entry = find(story, "events", f"{G0}.0.0", "turn_finished")
    event = ev.TrajectoryEvent.FromString(entry.data)
    event.seq = 7
    story.drop(entry)
    story.add("events", event)


def stranger(story: Story) -> None:
    story.episode("job-00009", 0)


def sibling_beyond(story: Story) -> None:
    story.episode(G0, 5)


def second_fate(story: Story) -> None:
    story.fate(G0, reason="zero_variance")


def fate_without_batch(story: Story) -> None:
    story.opened("job-00002")
    story.fate("job-00002", 9)


def fate_of_nobody(story: Story) -> None:
    story.fate("nobody", reason="gone")


def filtered_in_silence(story: Story) -> None:
    story.opened("job-00002")
    story.fate("job-00002")


def filtered_while_running(story: Story) -> None:
    story.opened("job-00002")
    story.episode("job-00002", 0)
    story.turn(("job-00002", 1, 0), 0)
    story.fate("job-00002", reason="zero_variance")


def two_batches(story: Story) -> None:
    story.train(3, {G0: [0, 0]})


def a_sibling_short(story: Story) -> None:
    story.group("job-00002")
    story.train(3, {"job-00002": [0]})


def older_attempt(story: Story) -> None:
    story.opened("job-00002")
    story.episode("job-00002", 0, 0, label=LOST)
    story.episode("job-00002", 0, 1)
    story.episode("job-00002", 1)
    story.train(3, {"job-00002": [0, 0]})


def unfinished_member(story: Story) -> None:
    story.opened("job-00002")
    story.episode("job-00002", 0)
    story.train(3, {"job-00002": [0, 0]})


def all_invalid(story: Story) -> None:
    story.opened("job-00002")
    for sibling in (0, 1):
        story.episode("job-00002", sibling, label=LOST)
    story.train(3, {"job-00002": [0, 0]})


def gap_in_steps(story: Story) -> None:
    story.group("job-00002")
    story.train(4, {"job-00002": [0, 0]})


def changed_composition(story: Story) -> None:
    story.group("job-00002")
    story.batch(2, {"job-00002": [0, 0]})


def unfrozen(story: Story) -> None:
    story.group("job-00002")
    story.batch(3, {"job-00002": [0, 0]}, trained=True)
    story.fate("job-00002", 3)


def trained_without_fate(story: Story) -> None:
    story.group("job-00002")
    story.batch(3, {"job-00002": [0, 0]})
    story.batch(3, {"job-00002": [0, 0]}, trained=True)


def foreign_version(story: Story) -> None:
    story.group("job-00002", version=77)
    story.train(3, {"job-00002": [0, 0]})


def abandoned_branch(story: Story) -> None:
    """Version 3 grows from 1, so tokens of 2 are not of its ancestry."""
    story.group("job-00002", version=2)
    story.batch(3, {"job-00002": [0, 0]}, version=1)
    story.version(3, 1, step=3)
    story.batch(3, {"job-00002": [0, 0]}, trained=True, version=1)
    story.fate("job-00002", 3)


def reused_version(story: Story) -> None:
    story.version(2, 1, step=2, digest="other")


def orphan_version(story: Story) -> None:
    story.version(9, 8)


def published_first(story: Story) -> None:
    durable, _ = story.version(3, 2)
    story.drop(durable)


def a_stage_twice(story: Story) -> None:
    story.again(story.version(3, 2)[0])


def own_parent(story: Story) -> None:
    story.version(3, 3)


def parents_in_a_circle(story: Story) -> None:
    """Must also come to an end."""
    story.version(3, 4)
    story.version(4, 3)
    story.group("job-00002", version=3)
    story.batch(3, {"job-00002": [0, 0]}, version=3)
    story.batch(3, {"job-00002": [0, 0]}, trained=True, version=3)
    story.fate("job-00002", 3)


def trained_then_frozen(story: Story) -> None:
    story.group("job-00002")
    story.batch(3, {"job-00002": [0, 0]}, trained=True)
    story.batch(3, {"job-00002": [0, 0]})
    story.fate("job-00002", 3)


def a_group_twice_in_one_batch(story: Story) -> None:
    story.group("job-00002")
    member = ev.BatchMember(group="job-00002", attempts=[0, 0])
    story.add(
        "batches", ev.BatchRecord(step=3, stage=ev.BATCH_STAGE_FROZEN, members=[member, member])
    )


def step_zero(story: Story) -> None:
    story.group("job-00002")
    story.batch(0, {"job-00002": [0, 0]})


def an_empty_batch(story: Story) -> None:
    story.batch(3, {})


def tokens_without_version(story: Story) -> None:
    entry = find(story, "events", f"{G0}.0.0", "turn_finished")
    event = ev.TrajectoryEvent.FromString(entry.data)
    event.turn_finished.spans[0].start = 1
    at = story.messages.index(entry)
    harmed = Received("events", entry.id, event.SerializeToString(), "")
    story.messages[at] = harmed


def repeated_valid(story: Story) -> None:
    story.opened("job-00002")
    story.episode("job-00002", 0, 0)
    story.episode("job-00002", 0, 1)


def parallel_attempt(story: Story) -> None:
    """The former attempt has turns and no end: a newer owner goes on with it instead."""
    story.owner = 2
    story.opened("job-00002")
    story.turn(("job-00002", 0, 0), 0)
    story.episode("job-00002", 0, 1)


def skipped_attempt(story: Story) -> None:
    story.opened("job-00002")
    story.episode("job-00002", 0, 1)


def old_owner(story: Story) -> None:
    story.opened("job-00002")
    story.owner = 2
    story.turn(("job-00002", 0, 1), 0)
    story.owner = 1
    story.turn(("job-00002", 1, 0), 0)


def too_many_groups(story: Story) -> None:
    story.opened("job-00002")


def another_size(story: Story) -> None:
    story.job("other", groups=1, size=4)
    story.opened("other-00000", size=3, job="other")


def job_of_two_sizes(story: Story) -> None:
    story.job(groups=7)


def unknown_job(story: Story) -> None:
    story.opened("ghost-00000", job="ghost")


def garbage(story: Story) -> None:
    story.add("events", ev.TrajectoryEvent(seq=3))


BREAKS = [
    (duplicate("events", f"{G0}.0.0", "episode_finished"), f"episode {G0}.0.0: finished 2 times"),
    (duplicate("outcomes", f"{G0}.0.0"), f"episode {G0}.0.0: labelled 2 times"),
    (late_same_turn, f"episode {G0}.0.0: turn 0 stands 2 times"),
    (duplicate("events", kind="group_opened"), f"group {G0}: opened 2 times"),
    (lose("events", f"{G0}.0.0", "episode_finished"), "labelled, but its end is lost"),
    (lose("events", f"{G0}.0.0", "turn_finished"), "turn 0 of 2 is lost"),
    (lose("outcomes", f"{G0}.0.0"), "finished, but has no label"),
    (lose("events", kind="group_opened"), f"sibling {G0}.0: its group was never opened"),
    (lose("fates"), f"group {G0}: trained in batch 1, but has no such fate"),
    (lose("batches"), "batch 1: trained, but its composition was never frozen"),
    (lose("jobs"), "job job: 2 groups were opened for it, but it was not recorded"),
    (late_turn, "turn 2, but it ended after 2 turns"),
    (late_turn, "a turn was written after the end"),
    (shuffled_seq, "a sequence number does not fit its turn"),
    (stranger, "sibling job-00009.0: its group was never opened"),
    (sibling_beyond, f"sibling {G0}.5: the group has only 2 siblings"),
    (second_fate, f"group {G0}: has 2 fates"),
    (second_fate, f"group {G0}: filtered, but stands in batch 1"),
    (fate_without_batch, "its fate says trained in batch 9, which does not hold it"),
    (fate_of_nobody, "group nobody: has a fate, but was never opened"),
    (filtered_in_silence, "group job-00002: filtered without a reason"),
    (filtered_while_running, "sibling job-00002.1: filtered, but it has no outcome"),
    (two_batches, f"group {G0}: stands in batches 1, 3"),
    (two_batches, "totals: 4 siblings dispatched, but 6 trained + 0 filtered + 0 open = 6"),
    (a_sibling_short, "batch 3, group job-00002: 1 siblings of 2"),
    (older_attempt, "sibling 0 counts attempt 0, but 1 is the newest finished"),
    (unfinished_member, "sibling 1 counts attempt 0, but none has finished"),
    (all_invalid, "batch 3, group job-00002: no sibling has a valid outcome"),
    (gap_in_steps, "batch 3: there is no such batch, but later ones"),
    (changed_composition, "batch 2: its composition changed after it was frozen"),
    (unfrozen, "batch 3: trained, but its composition was never frozen"),
    (trained_without_fate, "group job-00002: trained in batch 3, but has no such fate"),
    (foreign_version, "sampled from version 77, of which batch 3 is no descendant"),
    (abandoned_branch, "sampled from version 2, of which batch 3 is no descendant"),
    (reused_version, "version 2: the number was used for different weights"),
    (published_first, "version 3: published before it was durable"),
    (a_stage_twice, "version 3: a stage is recorded twice"),
    (own_parent, "version 3: its parent 3 is not older"),
    (parents_in_a_circle, "version 3: its parent 4 is not older"),
    (trained_then_frozen, "batch 3: trained before it was frozen"),
    (a_group_twice_in_one_batch, "batch 3: holds group job-00002 2 times"),
    (step_zero, "batch 0: steps begin at 1"),
    (an_empty_batch, "batch 3: has no members"),
    (tokens_without_version, f"episode {G0}.0.0, turn 0: has tokens without one version each"),
    (orphan_version, "version 9: its parent 8 is not recorded"),
    (repeated_valid, "episode job-00002.0.1: repeats attempt 0, which had a valid outcome"),
    (parallel_attempt, "episode job-00002.0.1: begun while attempt 0 had not ended"),
    (skipped_attempt, "episode job-00002.0.1: there is no attempt 0 before it"),
    (old_owner, "written by owner epoch 1 after 2 had taken over"),
    (too_many_groups, "job job: 3 groups opened, 2 asked, 0 replaced"),
    (another_size, "group other-00000: opened with 3 siblings, its job asks 4"),
    (job_of_two_sizes, "job job: recorded with different sizes"),
    (unknown_job, "job ghost: 1 groups were opened for it, but it was not recorded"),
    (garbage, "entry cannot be read"),
]


@pytest.mark.parametrize(
    ("harm", "told"), BREAKS, ids=[f"{n}-{told[:40]}" for n, (_, told) in enumerate(BREAKS)]
)
def test_each_breach_is_found(good: Story, harm: Callable[[Story], None], told: str) -> None:
    harm(good)
    assert any(told in line for line in problems(good)), problems(good)
