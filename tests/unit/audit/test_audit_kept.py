"""What the server keeps beside the streams: keys, totals, dead letters, refused writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from muster.audit import audit
from muster.decode import decode
from muster.entries import Dead, Kept, RunRecord, StreamState
from muster.types import Outcome, OutcomeLabel
from muster.v1 import events_pb2 as ev

LOST = OutcomeLabel(Outcome.INFRA_FAILURE, "host_lost")
G0, G1 = "job-00000", "job-00001"
Story = Any
TOTALS = {
    "trained": 1,
    "episodes": 2,
    "turns": 4,
    "outcome:model_success": 1,
    "outcome:model_failure": 1,
    "repairs": 0,
}
GONE = frozenset({0})
SOUND = Kept(
    totals={"job": TOTALS}, retired={"job": GONE}, retired_after={"job": GONE}, fenced={"router": 3}
)


def findings(record: RunRecord) -> list[str]:
    return [f"{f.severity} {f.where}: {f.what}" for f in audit(record).findings]


def kept(story: Story, found: Kept, **parts: Any) -> RunRecord:
    return decode("r", story.messages, (), kept=replace(found, **parts))


def test_a_retired_group_whose_entries_add_up_is_clean(good: Story) -> None:
    assert findings(kept(good, SOUND)) == [
        "note role router: 3 writes of a former owner were refused"
    ]


WRONG_TOTALS = [
    ({"turns": 3}, "job job: its total says 3 turns, its entries add up to 4"),
    ({"trained": 2}, "job job: its total says 2 trained, its entries add up to 1"),
    ({"episodes": 0}, "job job: its total says 0 episodes, its entries add up to 2"),
    ({"outcome:unknown": 1}, "its total says 1 outcome:unknown, its entries add up to 0"),
    ({"repairs": 1}, "job job: its total says 1 repairs, its entries 0 to 0"),
]


@pytest.mark.parametrize(("wrong", "told"), WRONG_TOTALS)
def test_totals_that_do_not_add_up_are_found(good: Story, wrong: dict[str, int], told: str) -> None:
    record = kept(good, SOUND, totals={"job": TOTALS | wrong})
    assert any(told in line for line in findings(record)), findings(record)


@pytest.mark.parametrize(("told", "clean"), [(2, False), (3, True), (4, True), (5, False)], ids=str)
def test_repairs_of_both_kinds_are_counted(story: Story, told: int, clean: bool) -> None:
    """A new attempt and two boxes; one more attempt was to come when the group was filtered."""
    story.job(groups=1)
    story.opened(G0)
    story.episode(G0, 0, 0, label=replace(LOST, replays=2))
    story.episode(G0, 0, 1, label=LOST)
    story.episode(G0, 1)
    story.fate(G0, reason="job_cancelled")
    totals = {"filtered": 1, "episodes": 3, "turns": 6, "repairs": told}
    totals |= {"outcome:infra_failure": 2, "outcome:model_failure": 1}
    found = [
        line for line in findings(kept(story, SOUND, totals={"job": totals})) if "total" in line
    ]
    assert (found == []) == clean, found


def test_a_cancelled_job_may_have_ended_more_than_the_bank_had_counted(story: Story) -> None:
    """A turn that was under way at the cancel was recorded just before its group went."""
    story.job(groups=1)
    story.opened(G0)
    story.turn((G0, 0, 0), 0)
    story.fate(G0, reason="job_cancelled")
    kept_as = replace(SOUND, totals={"job": {"filtered": 1}})
    told = "job job: its total says 0 turns, its entries add up to 1"
    assert f"problem {told}" in findings(kept(story, kept_as))
    story.add("jobs", ev.JobRecord(job="job", cancelled=True))
    assert f"note {told}" in findings(kept(story, kept_as))


def test_a_retired_group_without_any_record_is_found(good: Story) -> None:
    more = {"job": frozenset({0, 7})}
    record = kept(good, SOUND, retired=more, retired_after=more)
    assert "problem job job: of 1 retired groups there is no record" in findings(record)


@pytest.fixture
def stepped(story: Story) -> Story:
    """An open group of which one step is finished and one intended."""
    story.job(groups=1)
    story.opened(G0)
    story.step((G0, 0, 0), 0)
    story.step((G0, 0, 0), 1, finished=False)
    return story


P0, P1 = f"p:{G0}.0.0.0", f"p:{G0}.0.0.1"


def test_payloads_of_an_open_group_are_there(stepped: Story) -> None:
    record = kept(stepped, Kept(), payloads=frozenset({P0, P1}))
    assert audit(record).ok


def test_a_lost_payload_of_an_open_group_is_found(stepped: Story) -> None:
    record = kept(stepped, Kept(), payloads=frozenset({P0}))
    assert f"problem group {G0}: payloads are lost: {P1}" in findings(record)


def test_a_payload_of_a_retired_group_is_found(stepped: Story) -> None:
    retired = {"job": GONE}
    record = kept(stepped, Kept(), payloads=frozenset({P0}), retired=retired, retired_after=retired)
    assert f"problem group {G0}: retired, but it still holds {P0}" in findings(record)


def test_a_group_retired_while_it_was_read_is_neither_lost_nor_left_over(stepped: Story) -> None:
    """Its keys were listed in between: some may be there, some may be gone."""
    record = kept(stepped, Kept(), payloads=frozenset({P0}), retired_after={"job": GONE})
    assert audit(record).ok


def test_dead_letters_are_problems(good: Story) -> None:
    dead = [Dead("5-0", "events", "4-1", "truncated")]
    record = decode("r", good.messages, dead=dead)
    assert findings(record) == ["problem stream events 4-1: set aside as unreadable: truncated"]


def _states(**missing: int) -> list[StreamState]:
    return [StreamState("events", added=10 + missing["events"], length=6, on_disk=4)]


def test_trimmed_entries_that_are_on_disk_are_nothing_to_tell(good: Story) -> None:
    assert findings(decode("r", good.messages, _states(events=0))) == []


def test_trimmed_entries_that_are_nowhere_are_a_problem(good: Story) -> None:
    told = findings(decode("r", good.messages, _states(events=2)))
    lost = "2 entries were trimmed and are not in the history on disk"
    assert told == [f"problem stream events: {lost}"]


def _in_part(good: Story, *lost: Callable[[Any], bool]) -> RunRecord:
    """Read without the disk: what was trimmed of the first group is missing."""
    good.messages = [m for m in good.messages if not any(is_(m) for is_ in lost)]
    states = [StreamState("events", added=16, length=10)]
    return decode("r", good.messages, states, kept=SOUND, whole=False)


def test_without_the_history_only_groups_that_are_not_retired_are_examined(good: Story) -> None:
    record = _in_part(good, lambda m: m.stream == "events" and G0.encode() in m.data)
    found = audit(record)
    assert found.ok, found.problems
    assert {o.key.group for o in record.opened} == {G1}
    assert (found.totals.groups, found.totals.groups_retired) == (1, 1)
    assert any("1 retired groups are not examined" in f.what for f in found.findings)


def test_without_the_history_a_breach_of_the_others_is_found_all_the_same(good: Story) -> None:
    def a_turn_of_the_second(message: Any) -> bool:
        if message.stream != "events":
            return False
        event = ev.TrajectoryEvent.FromString(message.data)
        return event.episode.group == G1 and event.seq == 0 and event.HasField("turn_finished")

    record = _in_part(good, a_turn_of_the_second)
    assert any("turn 0 of 2 is lost" in line for line in findings(record))
