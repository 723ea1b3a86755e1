"""The bank against a dumb oracle, over random histories, interleavings, repeats, restarts and
losses of the newest records.

The oracle looks at everything that was fed so far and says which groups are whole, with which
attempts, and since when. The machine must freeze exactly the oldest of those, at once, and never
say anything else about them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.types import EpisodeKey, Outcome, OutcomeLabel
from services.readybank import events as e
from services.readybank.machine import BankMachine
from sim.builders import INFRA, RUN, UNKNOWN, attempt, opened, scored
from tests.scenarios.lossy_store import LossyStore

RULES = e.BankRules(valid_min=1, repairs_max=1, unacknowledged_max=100)
Message = tuple[str, Any]  # (stream, event)

labels = st.sampled_from([scored(1.0), scored(0.0), INFRA, UNKNOWN])


@st.composite
def histories(draw: st.DrawFn, honest: bool = False) -> list[list[Message]]:
    """What routers, one after the other, append: each inner list is one atomic call.

    An honest one starts no attempt after one whose label is final.
    """
    lines: list[list[list[Message]]] = []  # per sibling, in its own order
    groups: list[list[Message]] = []
    for number in range(draw(st.integers(1, 4))):
        group, size = f"g{number}", draw(st.integers(1, 3))
        groups.append([("events", opened(group, size))])
        for sibling in range(size):
            line: list[list[Message]] = []
            for which, label in enumerate(draw(st.lists(labels, min_size=1, max_size=3))):
                key = EpisodeKey(RUN, group, sibling, which, 1)
                events, said = attempt(key, label, turns=draw(st.integers(0, 2)))
                calls = [[("events", event)] for event in events[:-1]]
                whole = draw(st.integers(0, 5)) > 0  # else the router was cut in the middle
                if whole:
                    calls.append([("events", events[-1]), ("outcomes", said)])
                line += calls
                if honest and whole and (label.outcome.valid or which >= RULES.repairs_max):
                    break
            lines.append(line)
    order = draw(st.permutations([i for i, line in enumerate(lines) for _ in line]))
    merged = groups + [lines[i].pop(0) for i in order]
    epochs = sorted(draw(st.lists(st.integers(0, len(merged)), max_size=2)))
    return [
        [(s, _at(x, n, 1 + sum(n >= cut for cut in epochs))) for s, x in call]
        for n, call in enumerate(merged)
    ]


def _at(event: Any, at: int, owner: int) -> Any:
    """The event as written at time `at` by that owner."""
    if isinstance(event, e.GroupOpened):
        return msgspec.structs.replace(event, owner_epoch=owner, at_unix_s=float(at))
    key = msgspec.structs.replace(event.episode, owner_epoch=owner)
    return msgspec.structs.replace(event, episode=key, at_unix_s=float(at))


def oracle(fed: Sequence[Any]) -> dict[str, tuple[float, tuple[int, ...], bool]]:
    """Whole groups: since when, which attempts, trainable or not."""
    found = {}
    for group in (x for x in fed if isinstance(x, e.GroupOpened)):
        mine = [
            x for x in fed if not isinstance(x, e.GroupOpened) and x.episode.group == group.group
        ]
        attempts, times, valid = [], [group.at_unix_s], 0
        for sibling in range(group.group_size):
            tried = [x for x in mine if x.episode.sibling == sibling]
            newest = max((x.episode.attempt for x in tried), default=-1)
            of = [x for x in tried if x.episode.attempt == newest]
            label = next((x.label for x in of if isinstance(x, e.LabelRecorded)), None)
            end = next((x.turns for x in of if isinstance(x, e.EpisodeRecorded)), None)
            turns = {x.turn for x in of if isinstance(x, e.TurnRecorded)}
            if not _over(label, end, turns, newest):
                break
            attempts.append(newest)
            times += [x.at_unix_s for x in of]
            valid += label is not None and label.outcome.valid
        else:
            found[group.group] = (max(times), tuple(attempts), valid >= RULES.valid_min)
    return found


def _over(label: OutcomeLabel | None, end: int | None, turns: set[int], number: int) -> bool:
    if label is None:
        return False
    if label.outcome in (Outcome.INFRA_FAILURE, Outcome.UNKNOWN):
        return number >= RULES.repairs_max
    return end is not None and turns == set(range(end))


class Bench:
    """A machine, its store, and all that it ever said."""

    def __init__(self) -> None:
        self.store, self.machine = LossyStore(), BankMachine(RULES)
        self.fed: list[Any] = []
        self.fates: list[str] = []
        self.frozen: dict[int, e.Batch] = {}
        self.sent: dict[int, e.SendBatch] = {}
        self.asked: tuple[int, int] | None = None  # step, groups
        self.again: e.SendBatch | None = None  # the last batch that was sent
        self.epoch = 1
        self.durable = 0  # newest step in the trainer's checkpoint
        self.brought: e.Batch | None = None  # what it says of that step when it registers
        self.refused = False

    def feed(self, event: e.BankEvent) -> None:
        for command in self.machine.handle(event, 0.0):
            self.heard(command)
            result = self.store.write(command, 0)
            if result is not None:
                self.feed(result)

    def heard(self, command: e.BankCommand) -> None:
        if isinstance(command, e.WriteFate):
            self.fates.append(command.fate.group)
        elif isinstance(command, e.WriteTrained):
            self.fates += [fate.group for fate in command.fates]
        elif isinstance(command, e.WriteFrozen):
            if command.batch != self.brought:
                self.check_choice(command.batch)
            self.frozen[command.batch.step] = command.batch
        elif isinstance(command, e.SendBatch):
            said = self.again = msgspec.structs.replace(command, call="")
            assert said.batch == self.frozen[said.batch.step]
            assert said == self.sent.setdefault(said.batch.step, said)
            self.asked = None
        elif isinstance(command, e.RefuseCall) and command.call == "register":
            self.refused = True

    def candidates(self) -> list[tuple[float, str, tuple[int, ...]]]:
        used = {m.group for b in self.frozen.values() for m in b.members} | set(self.fates)
        whole = oracle(self.fed)
        return sorted((at, g, a) for g, (at, a, ok) in whole.items() if ok and g not in used)

    def check_choice(self, batch: e.Batch) -> None:
        assert self.asked is not None
        best = self.candidates()[: self.asked[1]]
        assert [(m.group, m.attempts) for m in batch.members] == [(g, a) for _, g, a in best]
        assert batch.complete_unix_s == best[-1][0]

    def check_rest(self) -> None:
        """Nothing that could be said was left unsaid, nothing was said twice."""
        assert len(self.fates) == len(set(self.fates))
        assert not self.store.conflicts
        if self.asked is not None:
            assert len(self.candidates()) < self.asked[1]
        frozen = [m.group for b in self.frozen.values() for m in b.members]
        assert len(frozen) == len(set(frozen))
        for group, (_, _, trainable) in oracle(self.fed).items():
            assert trainable or group in self.fates or group in frozen

    def put(self, call: list[Message], late: bool) -> None:
        """Append a call's messages and feed them; `late` reverses the streams."""
        for stream, event in call:
            self.store.streams[stream].append(event)
        for _, event in reversed(call) if late else call:
            self.fed.append(event)
            self.feed(event)

    def lease(self, groups: int) -> None:
        step = len(self.frozen) + 1
        self.asked = (step, groups)
        self.feed(e.LeaseAsked(self.epoch, step, groups, "lease", 0.0))

    def restart(self) -> None:
        self.machine = BankMachine(RULES)
        for event in self.store.recovery():
            self.feed(event)
        if self.asked is not None:
            self.lease(self.asked[1])

    def acknowledge(self) -> None:
        self.durable = max(self.frozen)
        self.feed(e.AckAsked(self.epoch, self.durable, "ack"))

    def trainer_returns(self, step: int) -> None:
        """A new incarnation whose checkpoint ends before `step` gets what the former one got."""
        self.epoch += 1
        self.asked = None
        self.durable = step - 1
        self.brought = self.sent[self.durable].batch if self.durable else None
        self.feed(e.TrainerRegistered(self.epoch, self.durable, "register", self.brought))
        if self.refused:
            return
        assert self.brought is None or self.frozen[self.durable] == self.brought
        for again in range(step, max(self.frozen, default=0) + 1):
            self.again = None
            self.feed(e.LeaseAsked(self.epoch, again, 1, "again", 0.0))
            assert self.again == self.sent[again]

    def records_lost(self, count: int) -> None:
        """The bank's last records are gone and it restarts; the trainer's checkpoint is not gone.

        Then no group of any step of the checkpoint is ever leased again, or nothing is.
        """
        self.store.lose(count)
        self.frozen, self.fates = dict(self.store.batches), list(self.store.fates)
        known = set(self.frozen) | {self.durable}
        self.sent = {step: sent for step, sent in self.sent.items() if step in known}
        self.asked = None
        self.restart()
        self.trainer_returns(self.durable + 1)
        assert self.refused == any(step not in known for step in range(1, self.durable))
        if not self.refused:
            self.restart()


actions = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.booleans()),
        st.tuples(st.just("put"), st.booleans()),
        st.tuples(st.just("lease"), st.integers(1, 2)),
        st.tuples(st.just("repeat"), st.integers(0, 50)),
        st.tuples(st.just("stale"), st.integers(0, 50)),
        st.tuples(st.just("ack"), st.just(0)),
        st.tuples(st.just("restart"), st.just(0)),
        st.tuples(st.just("return"), st.integers(0, 50)),
        st.tuples(st.just("lose"), st.integers(1, 4)),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(histories(), actions)
def test_the_bank_says_what_the_oracle_says(
    history: list[list[Message]], todo: list[tuple[str, Any]]
) -> None:
    bench, left = Bench(), list(history)
    # Whatever is left when the actions are over comes at the end.
    for action, value in [*todo, *[("put", False)] * len(left), ("lease", 1), ("restart", 0)]:
        _act(bench, left, action, value)
        if bench.refused:  # it says what to restore, and leases nothing
            return
        bench.check_rest()


def _act(bench: Bench, left: list[list[Message]], action: str, value: Any) -> None:
    if action == "put" and left:
        bench.put(left.pop(0), value)
    elif action == "lease" and bench.asked is None:
        bench.lease(value)
    elif action == "repeat" and bench.fed:
        bench.feed(bench.fed[value % len(bench.fed)])
    elif action == "stale" and bench.fed:
        _former_owner(bench, bench.fed[value % len(bench.fed)])
    elif action == "ack" and bench.frozen:
        bench.acknowledge()
    elif action == "restart":
        bench.restart()
    elif action == "return" and bench.frozen:
        bench.trainer_returns(1 + value % len(bench.frozen))
    elif action == "lose":
        bench.records_lost(value)


afterthoughts = st.sampled_from([None, None, INFRA, scored(0.0)])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(afterthoughts, min_size=1, max_size=6),
    st.integers(0, 6),
    st.integers(0, 2),
    st.integers(1, 6),
)
def test_lost_records_lead_to_no_second_training(
    after: list[OutcomeLabel | None], early: int, untrained: int, lost: int
) -> None:
    """The `early` groups are leased, and all but `untrained` of them are in a checkpoint.

    Some routers then start another attempt where nobody needs one: once the record of the batch is
    lost, that attempt is the newest.
    """
    bench = Bench()
    for number in range(len(after)):
        bench.put(_group(number), late=False)
        if number < early:
            bench.lease(1)
        if number < early - untrained:
            bench.acknowledge()
    for number, label in enumerate(after):
        if label is not None:
            bench.put(_attempt(number, 1, label), late=False)
    bench.records_lost(lost)
    while not bench.refused and bench.asked is None:
        bench.lease(1)
        bench.check_rest()
    if bench.frozen and not bench.refused:
        bench.acknowledge()
        bench.restart()
        bench.trainer_returns(1)  # to a checkpoint before all of them: it gets them all again
        bench.check_rest()


def _group(number: int) -> list[Message]:
    return [("events", opened(f"g{number}", 1)), *_attempt(number, 0, scored(1.0))]


def _attempt(number: int, which: int, label: OutcomeLabel) -> list[Message]:
    events, said = attempt(EpisodeKey(RUN, f"g{number}", 0, which, 1), label, at=float(number))
    return [*(("events", event) for event in events), ("outcomes", said)]


def _former_owner(bench: Bench, event: Any) -> None:
    """A newer attempt, but of an owner that was replaced: as if it had never been said."""
    if not isinstance(event, e.GroupOpened):
        key = msgspec.structs.replace(event.episode, attempt=9, owner_epoch=0)
        bench.feed(msgspec.structs.replace(event, episode=key))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(histories(honest=True), st.randoms(use_true_random=False))
def test_what_is_ready_does_not_depend_on_how_the_streams_interleave(
    history: list[list[Message]], chance: Any
) -> None:
    streams = {
        s: [x for call in history for t, x in call if t == s] for s in ("events", "outcomes")
    }
    batches = []
    for _ in range(3):
        machine, left = BankMachine(RULES), {s: list(x) for s, x in streams.items()}
        while any(left.values()):
            name = chance.choice([s for s in left if left[s]])
            machine.handle(left[name].pop(0), 0.0)
        said: list[e.BankCommand] = []
        for step in range(1, 6):
            said += machine.handle(e.LeaseAsked(1, step, 1, f"c{step}", 0.0), 0.0)
            said += machine.handle(e.BatchFrozen(step), 0.0)
        batches.append([c for c in said if isinstance(c, e.SendBatch)])
    assert batches[0] == batches[1] == batches[2]
