"""The checks can fail: each planted defect is seen, by the invariant that it breaks.

Part one writes a wrong fact into a calm world, part two plants a bug in a machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from muster import codec
from muster.errors import Unavailable
from muster.streams import StreamEntry
from muster.types import EpisodeKey, Fate, Outcome, OutcomeLabel, StepLimit
from muster.v1 import events_pb2 as ev
from services.readybank import events as bank
from services.readybank.machine import BankMachine
from services.router import events as router
from services.router.adapters.clocks import Clocks
from services.router.adapters.reach import DiedInFlight
from services.router.machine import RouterMachine
from sim.calls import Calls
from sim.checks import Violation
from sim.engine import Replica
from sim.experiment import Bench, Parts, faults_of, simulate
from sim.models import BOXES_GO, CALM, FRAIL, LOSSY, ROUGH, Model
from sim.streams import RUN

SELDOM_SAVED = structs.replace(ROUGH, checkpoint_every=3)
PASSED = OutcomeLabel(Outcome.MODEL_SUCCESS, "passed", 1.0)
LOST = OutcomeLabel(Outcome.INFRA_FAILURE, "host_lost")


class Half:
    """A calm world in the midst of its work."""

    def __init__(self) -> None:
        self.bench = Bench(2, CALM)
        self.bench.world.run(self._some_steps, self.bench.checks, until_s=100.0)
        self.facts = self.bench.checks.facts
        self.open = next(g for g in reversed(self.facts.opened) if g not in self.facts.step_of)

    def _some_steps(self) -> bool:
        return len(self.bench.checks.facts.trained) >= 2

    def write(self, stream: str, message: Any, dedupe: str = "planted") -> None:
        entry = StreamEntry(stream, "planted", dedupe, message.SerializeToString())
        self.bench.store.append([entry], {})

    def key(self, group: str, sibling: int = 0, attempt: int = 0, owner: int = 1) -> EpisodeKey:
        return EpisodeKey(RUN, group, sibling, attempt, owner)

    def planted(self) -> EpisodeKey:
        """An open group that the machines know nothing of."""
        key = self.key("job-99999")
        self.event(key, group_opened=ev.GroupOpened(job="job", group_size=3))
        return key

    def label(self, key: EpisodeKey, label: OutcomeLabel) -> None:
        self.write("outcomes", codec.label_to_pb(key, label), f"{key.id}{label}")

    def event(self, key: EpisodeKey, **of: Any) -> None:
        self.write(
            "events", ev.TrajectoryEvent(episode=codec.key_to_pb(key), **of), f"{key.id}{of}"
        )


def a_lost_turn(half: Half) -> None:
    key = half.planted()
    half.event(key, seq=2, episode_finished=ev.EpisodeFinished(turns=2))


def a_new_attempt_after_a_valid_one(half: Half) -> None:
    group = next(iter(half.facts.step_of))
    opened = half.key(group, attempt=1)
    half.facts.retired.discard(group)
    half.event(opened, seq=0, turn_finished=ev.TurnFinished(turn=0))


def a_turn_written_twice(half: Half) -> None:
    key = half.planted()
    for n in range(2):
        half.event(key, turn_finished=ev.TurnFinished(turn=0, replica=str(n)))


def two_fates(half: Half) -> None:
    group = next(iter(half.facts.fates))
    half.write("fates", ev.GroupFate(group=group, fate=codec.fate_to_pb(Fate.FILTERED)))


def a_group_in_two_steps(half: Half) -> None:
    again = ev.BatchRecord()
    again.CopyFrom(half.facts.frozen[1])
    again.step = 9
    half.write("batches", again)


def a_sibling_missing(half: Half) -> None:
    again = ev.BatchRecord()
    again.CopyFrom(half.facts.frozen[1])
    again.step = 9
    del again.members[0].attempts[0]
    half.facts.step_of.clear()
    half.facts.fates.clear()
    half.write("batches", again)


def another_composition(half: Half) -> None:
    again = ev.BatchRecord()
    again.CopyFrom(half.facts.frozen[1])
    again.members.reverse()
    half.write("batches", again)


def a_former_owner(half: Half) -> None:
    half.label(half.key(half.open, owner=0), LOST)


def an_older_attempt(half: Half) -> None:
    first = half.planted()
    for key in (first, structs.replace(first, attempt=1)):
        half.label(key, LOST)
    half.label(first, PASSED)


def a_success_that_nobody_judged(half: Half) -> None:
    half.label(half.planted(), PASSED)


def a_version_with_two_parents(half: Half) -> None:
    half.write("versions", ev.PolicyVersionRecord(version=1, parent=7))


def tokens_that_were_never_sampled(half: Half) -> None:
    half.bench.engines.sampled.clear()


def a_box_too_many(half: Half) -> None:
    half.bench.checks.model = structs.replace(half.bench.model, boxes_max=0)


def a_command_run_twice(half: Half) -> None:
    box = half.bench.hosts[0].boxes_ever[-1]
    for _ in range(2):
        box.run(7, "again", 0.0)
        half.bench.checks._on_run(box, 7)


def an_attempt_too_many(half: Half) -> None:
    for attempt in range(4):
        half.label(half.key("job-99999", attempt=attempt), LOST)


def a_group_retired_too_early(half: Half) -> None:
    half.bench.store.retire(half.open, "job", 0, {}, ())


def entries_trimmed_too_early(half: Half) -> None:
    last = half.bench.store.streams["events"][-1].id
    half.bench.store.trim("events", last, ())


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (a_lost_turn, "1: .* has 0 turns"),
        (a_new_attempt_after_a_valid_one, "1: .* begins though attempt 0 was not lost"),
        (a_group_retired_too_early, "1: .* before its fate was durable"),
        (entries_trimmed_too_early, "1: .* was trimmed and not archived"),
        (a_turn_written_twice, "2: .* is there already"),
        (two_fates, "2: .* is trained and filtered"),
        (a_group_in_two_steps, "2: .* is in step 1"),
        (a_sibling_missing, "2: .* has 2 siblings"),
        (another_composition, "2: step 1 has two compositions"),
        (a_former_owner, "3: .* of owner 0 was taken"),
        (an_older_attempt, "3: .* is of an older attempt"),
        (a_success_that_nobody_judged, "4: .* no verifier saw"),
        (a_version_with_two_parents, "5: .* has two parents"),
        (tokens_that_were_never_sampled, "6: .* never sampled"),
        (a_box_too_many, "9: host-. has"),
        (a_command_run_twice, "11: turn 7 ran 2 times"),
        (an_attempt_too_many, "12: .* is attempt 3"),
    ],
)
def test_a_wrong_fact_is_seen(plant: Callable[[Half], None], expected: str) -> None:
    half = Half()
    plant(half)
    with pytest.raises(Violation, match=expected):
        half.bench.run()


def test_what_was_told_to_be_durable_and_is_gone_is_seen_at_the_end() -> None:
    half = Half()
    half.bench.routers[0].acked.add("job-00099.0.0")
    with pytest.raises(Violation, match="1: job-00099"):
        half.bench.run()


class ForgetsBatches(BankMachine):
    """Does not look at the batches that were frozen before it started."""

    def handle(self, event: bank.BankEvent, now: float) -> list[bank.BankCommand]:
        kept = not isinstance(event, bank.BatchRestored)
        return super().handle(event, now) if kept else []


class SendsBeforeWriting(BankMachine):
    """Takes a composition for durable as soon as it is decided."""

    def handle(self, event: bank.BankEvent, now: float) -> list[bank.BankCommand]:
        commands = super().handle(event, now)
        frozen = [c for c in commands if isinstance(c, bank.WriteFrozen)]
        early = [x for c in frozen for x in self.handle(bank.BatchFrozen(c.batch.step), now)]
        return [*early, *commands]


class NeverFrees(RouterMachine):
    """Does not hear of groups that were filtered, so their slots stay taken."""

    def handle(self, event: Any, now: float) -> list[Any]:
        told = isinstance(event, router.FateRecorded) and event.fate is Fate.FILTERED
        return [] if told else super().handle(event, now)


class RunsBeforeIntent(RouterMachine):
    """Lets a command run before that it will run is durable."""

    def handle(self, event: Any, now: float) -> list[Any]:
        commands = super().handle(event, now)
        intents = [c for c in commands if isinstance(c, router.RecordIntent)]
        rest: list[Any] = [c for c in commands if not isinstance(c, router.RecordIntent)]
        for c in intents:
            rest += super().handle(router.IntentRecorded(c.episode, c.turn), now)
        return rest


class GuessesSteps(RouterMachine):
    """Takes a step whose result is lost for one that did nothing."""

    def handle(self, event: Any, now: float) -> list[Any]:
        if isinstance(event, router.StepFailed):
            event = router.StepFinished(
                *(event.episode, event.turn, 1, StepLimit.NONE, 0.0, 0.0, "", False, now, now),
                box=event.box,
            )
        return super().handle(event, now)


class MeasuresByTheWall(Calls):
    """Takes the wall clock at both ends of a call."""

    def __init__(self, owner: Any, *others: Any) -> None:
        super().__init__(owner, *others)
        self.clocks = Clocks(owner.wall, owner.wall)


class TakesSilenceForDeath(Calls):
    """Takes a host that does not answer for one that died."""

    def _keyed(self, op: str, host: Any, serve: Any, hear: Any, *limits: Any, **hears: Any) -> None:
        """Not one repeat, and what brought no answer is blamed."""

        def heard(found: Any) -> None:
            silent = isinstance(found, Unavailable)
            hear(DiedInFlight(str(found)) if silent else found)

        self.net.call(self.router, host, op, serve, heard, limits[0])


class ServesAtOnce(Replica):
    """Serves what its checkpoint holds, whatever the others serve."""

    def _started(self, published: int | None) -> None:
        super()._started(None)


class SuspectsReplayedCommands(RouterMachine):
    """Blames a command for a box that was lost while the box was rebuilt."""

    def handle(self, event: Any, now: float) -> list[Any]:
        if isinstance(event, router.StepFailed):
            episode = self._episodes.get(event.episode.id)
            if episode is not None and event.loss is not router.Loss.UNKNOWN:
                episode._killed.setdefault(event.turn, set()).add(episode.host)
        return super().handle(event, now)


@pytest.mark.parametrize(
    ("parts", "model", "expected"),
    [
        (Parts(calls=MeasuresByTheWall), ROUGH, "4: .*(budget_time|interval)"),
        (Parts(router=SuspectsReplayedCommands), BOXES_GO, "4: .* kills hosts"),
        (Parts(calls=TakesSilenceForDeath), FRAIL, "4: .* kills hosts"),
        (Parts(replica=ServesAtOnce), SELDOM_SAVED, "8: .* was published"),
        (
            Parts(bank=ForgetsBatches),
            ROUGH,
            " (1|2|3): |raised|13: .*( lost here|no record of step)",
        ),
        (Parts(bank=SendsBeforeWriting), ROUGH, " 2: .*before it was durable"),
        (Parts(router=NeverFrees), LOSSY, "13: no end"),
        (Parts(router=RunsBeforeIntent), CALM, "11: .*without an intent"),
        (Parts(router=GuessesSteps), ROUGH, "11: .*never ran|11: turn|1: |3: "),
    ],
)
def test_a_broken_machine_is_caught(parts: Parts, model: Model, expected: str) -> None:
    """Within a few seeds."""
    for seed in range(40):
        problem = _problem(seed, model, parts)
        if problem:
            assert re.search(expected, problem), problem
            return
    pytest.fail("not caught")


def test_a_leader_that_lives_on_when_the_store_lost_records_is_caught() -> None:
    """It goes on from memory: what it builds does not fit what its followers read."""
    model = structs.replace(ROUGH, power_cuts=True)
    for seed in range(1, 40):
        bench = Bench(seed, model)
        bench.shared.keeps_all = True
        bench.plan(faults_of(seed, model))
        try:
            bench.run()
        except Violation:
            return
    pytest.fail("not caught")


def _problem(seed: int, model: Model, parts: Parts) -> str:
    try:
        return simulate(seed, model, parts=parts).problem
    except (KeyError, AssertionError, ValueError) as error:
        return f"raised {error!r}"
