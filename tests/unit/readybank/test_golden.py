"""Groups whose numbers others have got wrong, as a trainer gets them."""

from __future__ import annotations

from services.readybank import events as e
from services.readybank.machine import BankMachine
from sim.builders import INFRA, attempt, key, opened, scored


def _leased(*groups: str, rewards: dict[str, tuple[float | None, ...]]) -> e.SendBatch:
    machine = BankMachine(e.BankRules(repairs_max=0))
    for group in groups:
        job = group.rpartition("-")[0]
        machine.handle(opened(group, len(rewards[group]), job=job), 0.0)
        for number, reward in enumerate(rewards[group]):
            label = INFRA if reward is None else scored(reward)
            events, said = attempt(key(group, number), label, turns=2)
            for event in [*events, said]:
                machine.handle(event, 0.0)
    machine.handle(e.LeaseAsked(1, 1, len(groups), "call", 0.0), 0.0)
    (sent,) = machine.handle(e.BatchFrozen(1), 0.0)
    assert isinstance(sent, e.SendBatch)
    return sent


def test_a_masked_sibling_travels_with_its_label_and_nothing_else() -> None:
    sent = _leased("a-0", rewards={"a-0": (1.0, 3.0, 2.0, None)})
    (group,) = sent.groups
    assert [s.label.reward for s in group.siblings] == [1.0, 3.0, 2.0, None]
    assert [s.label.outcome.valid for s in group.siblings] == [True, True, True, False]
    assert [len(s.payload_keys) for s in group.siblings] == [2, 2, 2, 0]


def test_one_success_and_groups_without_contrast_go_as_they_are() -> None:
    rewards = {"a-0": (1.0, 0.0, 0.0, 0.0), "a-1": (0.0, 0.0), "a-2": (1.0, 1.0)}
    sent = _leased("a-0", "a-1", "a-2", rewards=rewards)
    found = {g.group: tuple(s.label.reward for s in g.siblings) for g in sent.groups}
    assert found == rewards


def test_identical_tasks_of_two_jobs_stay_two_groups() -> None:
    sent = _leased("a-0", "b-0", rewards={"a-0": (1.0, 0.0), "b-0": (0.0, 1.0)})
    assert [g.task for g in sent.groups] == ["task", "task"]
    keys = [key for g in sent.groups for s in g.siblings for key in s.payload_keys]
    assert len(keys) == len(set(keys)) == 8
    assert [s.label.reward for g in sent.groups for s in g.siblings] == [1.0, 0.0, 0.0, 1.0]


def test_the_turns_of_an_episode_come_in_order_whatever_segments_they_hold() -> None:
    """Two contexts of one episode are two training segments with one label."""
    sent = _leased("a-0", rewards={"a-0": (1.0, 0.0)})
    (group,) = sent.groups
    assert group.siblings[0].payload_keys == ("p:a-0.0.0.0", "p:a-0.0.0.1")
