"""Groups of an evaluation in the bank: counted when they are complete, and never leased."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from muster.evaluated import EvaluatedSibling
from muster.types import Fate, OutcomeLabel, Purpose
from services.readybank import events as e
from services.readybank import explain
from services.readybank.machine import BankMachine
from sim.builders import INFRA, attempt, key, opened, scored


class Bank:
    """A machine, and all that it said."""

    def __init__(self, **rules: Any):
        self.machine = BankMachine(e.BankRules(**rules))
        self.number = 0
        self.said: list[e.BankCommand] = []

    def feed(self, *events: e.BankEvent) -> list[e.BankCommand]:
        said = []
        for event in events:
            if hasattr(event, "id"):
                self.number += 1
                event = replace(event, id=f"{self.number}-0")  # type: ignore[type-var]
            said += self.machine.handle(event, 0.0)
        self.said += said
        return said

    def group(self, name: str, *labels: OutcomeLabel, purpose: Purpose) -> list[e.BankCommand]:
        job = name.rpartition("-")[0]
        said = self.feed(replace(opened(name, len(labels), job=job), purpose=purpose))
        for number, label in enumerate(labels):
            said += self.sibling(name, number, label)
        return said

    def sibling(
        self, group: str, number: int, label: OutcomeLabel, which: int = 0
    ) -> list[e.BankCommand]:
        events, told = attempt(key(group, number, which), label, turns=2, version=3)
        turns = [
            replace(event, prompt_tokens=10, replica=f"r{n}")
            if isinstance(event, e.TurnRecorded)
            else event
            for n, event in enumerate(events)
        ]
        return self.feed(*turns, told)


def fates(said: list[e.BankCommand]) -> list[e.WriteFate]:
    return [command for command in said if isinstance(command, e.WriteFate)]


def test_a_complete_group_is_evaluated_with_what_counts_of_it() -> None:
    bank = Bank(repairs_max=1)
    bank.group("v-0", scored(1.0), INFRA, purpose=Purpose.EVALUATE)
    assert not fates(bank.said)
    (written,) = fates(bank.sibling("v-0", 1, scored(0.0), which=1))
    assert written.fate == e.FateRecord("v-0", Fate.EVALUATED)
    found = written.evaluated
    assert found is not None
    assert (found.group, found.job, found.task) == ("v-0", "v", "task")
    figures = (2, 20, 8, (3,), ("r0", "r1"))
    assert found.siblings == (
        EvaluatedSibling(0, 0, scored(1.0), *figures),
        EvaluatedSibling(1, 1, scored(0.0), *figures),
    )


def test_too_few_valid_siblings_are_no_reason_to_hide_a_group() -> None:
    bank = Bank(repairs_max=0, valid_min=2)
    (written,) = fates(bank.group("v-0", INFRA, INFRA, purpose=Purpose.EVALUATE))
    assert written.evaluated is not None
    assert [s.label.outcome.valid for s in written.evaluated.siblings] == [False, False]


def test_an_unknown_version_holds_no_evaluation_up() -> None:
    """Which version it was is part of its result."""
    bank = Bank(valid_min=1)
    (written,) = fates(bank.group("v-0", scored(1.0), purpose=Purpose.EVALUATE))
    assert written.fate.fate is Fate.EVALUATED


def test_a_trainer_that_asks_gets_none_of_it() -> None:
    bank = Bank(valid_min=1)
    bank.feed(e.VersionSeen(3, 0, published=True), e.RecoveryEnded())
    bank.feed(e.LeaseAsked(1, 1, 1, "call", 0.0))
    bank.group("v-0", scored(1.0), purpose=Purpose.EVALUATE)
    assert not [c for c in bank.said if isinstance(c, e.WriteFrozen)]
    bank.group("t-0", scored(1.0), purpose=Purpose.TRAIN)
    (frozen,) = [c for c in bank.said if isinstance(c, e.WriteFrozen)]
    assert [member.group for member in frozen.batch.members] == ["t-0"]


def test_no_batch_waits_for_it() -> None:
    """Nor is it counted among what a batch could be made of."""
    bank = Bank(valid_min=1)
    bank.feed(e.VersionSeen(3, 0, published=True), e.RecoveryEnded())
    bank.feed(e.LeaseAsked(1, 1, 2, "call", 0.0))
    bank.feed(replace(opened("a-0", 1, job="a"), purpose=Purpose.EVALUATE))
    bank.group("t-0", scored(1.0), purpose=Purpose.TRAIN)
    lines, could_be = explain.batch(bank.machine)
    assert (len(lines), could_be) == (1, [])
    assert "no other is open" in lines[0].waits_for
    assert explain.waits_for(bank.machine) == "1 ready, 0 held, 0 open"
    (ready,) = (explain.group(bank.machine, "t-0") or [])[:1]
    assert ready.next_command == "muster explain batch"


def test_it_is_retired_without_a_word_of_a_trainer() -> None:
    """An evaluation may run where no trainer does."""
    bank = Bank(valid_min=1)
    bank.feed(e.RecoveryEnded())
    bank.group("v-0", scored(1.0), purpose=Purpose.EVALUATE)
    (retired,) = [c for c in bank.feed(e.FateWritten("v-0")) if isinstance(c, e.RetireGroups)]
    (over,) = retired.groups
    assert over.totals == {"episodes": 1, "evaluated": 1, "outcome:model_success": 1, "turns": 2}
    assert len(over.keys) == 2


def test_a_bank_that_starts_again_retires_what_was_evaluated_and_says_nothing_twice() -> None:
    bank = Bank(valid_min=1)
    bank.feed(e.FateRestored("v-0", Fate.EVALUATED))
    bank.group("v-0", scored(1.0), purpose=Purpose.EVALUATE)
    said = bank.feed(e.RecoveryEnded())
    assert not fates(bank.said)
    (retired,) = [c for c in said if isinstance(c, e.RetireGroups)]
    assert retired.groups[0].totals["evaluated"] == 1


def test_a_cancelled_evaluation_is_filtered_and_goes_too() -> None:
    bank = Bank()
    bank.feed(e.RecoveryEnded())
    bank.feed(replace(opened("v-0", 2, job="v"), purpose=Purpose.EVALUATE))
    (written,) = fates(bank.feed(e.JobCancelled("v")))
    assert (written.fate.fate, written.evaluated) == (Fate.FILTERED, None)
    assert [c for c in bank.feed(e.FateWritten("v-0")) if isinstance(c, e.RetireGroups)]
