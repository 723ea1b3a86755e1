"""The bank against a dumb oracle, over random histories, interleavings, repeats, restarts, clocks,
kills between any two effects, retirements, and losses of the newest records.

The oracle looks at everything that was fed so far and says which groups are whole, with which
attempts, and since when. The machine must freeze exactly those that the rule of batch.py names, at
once, and never say anything else about them again; and nothing may be left of a group that is over,
nor anything be missing of one that is not. MUSTER_TEST_EXAMPLES sets how many examples are tried.
"""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.types import EpisodeKey, OutcomeLabel, Purpose
from services.readybank import events as e
from services.readybank.machine import BankMachine
from sim.builders import INFRA, RUN, UNKNOWN, attempt, opened, scored
from tests.property.bank_bench import EVALUATES, EXAMPLES, POLICIES, RULES, Bench, Message, rules_of
from tests.scenarios.lossy_store import Killed

labels = st.sampled_from([scored(1.0), scored(0.0), INFRA, UNKNOWN])


@st.composite
def histories(draw: st.DrawFn, honest: bool = False) -> list[list[Message]]:
    """What routers, one after the other, append: each inner list is one atomic call.

    An honest one starts no attempt after one whose label is final.
    """
    lines: list[list[list[Message]]] = []  # per sibling, in its own order
    groups: list[list[Message]] = []
    for number in range(draw(st.integers(1, 4))):
        job = draw(st.sampled_from(sorted(POLICIES)))
        group, size = f"{job}-{number}", draw(st.integers(1, 3))
        groups.append([("events", _opened(group, size))])
        for sibling in range(size):
            line: list[list[Message]] = []
            for which, label in enumerate(draw(st.lists(labels, min_size=1, max_size=3))):
                key = EpisodeKey(RUN, group, sibling, which, 1)
                events, said = attempt(key, label, turns=draw(st.integers(0, 2)))
                calls = [[("events", event)] for event in events[:-1]]
                if draw(st.booleans()):  # its command was about to run
                    calls.insert(len(calls) // 2, [("events", _intended(key, len(calls)))])
                whole = draw(st.integers(0, 5)) > 0  # else the router was cut in the middle
                if whole:
                    calls.append([("events", events[-1]), ("outcomes", said)])
                line += calls
                if (
                    honest
                    and whole
                    and (label.outcome.valid or which >= rules_of(group).repairs_max)
                ):
                    break
            lines.append(line)
    order = draw(st.permutations([i for i, line in enumerate(lines) for _ in line]))
    merged = groups + [lines[i].pop(0) for i in order]
    epochs = sorted(draw(st.lists(st.integers(0, len(merged)), max_size=2)))
    return [
        [(s, _at(x, n, 1 + sum(n >= cut for cut in epochs))) for s, x in call]
        for n, call in enumerate(merged)
    ]


def _opened(group: str, size: int) -> e.GroupOpened:
    job = group.rpartition("-")[0]
    purpose = Purpose.EVALUATE if job == EVALUATES else Purpose.TRAIN
    made = opened(group, size, job=job)
    return msgspec.structs.replace(made, policy=POLICIES[job], purpose=purpose)


def _intended(key: EpisodeKey, turn: int) -> e.TurnIntended:
    return e.TurnIntended(key, turn, f"p:{key.id}.{turn}", 0.0)


def _at(event: Any, at: int, owner: int) -> Any:
    """The event as written at time `at` by that owner."""
    if isinstance(event, e.GroupOpened):
        return msgspec.structs.replace(event, owner_epoch=owner, at_unix_s=float(at))
    key = msgspec.structs.replace(event.episode, owner_epoch=owner)
    return msgspec.structs.replace(event, episode=key, at_unix_s=float(at))


actions = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.booleans()),
        st.tuples(st.just("put"), st.booleans()),
        st.tuples(st.just("unread"), st.booleans()),
        st.tuples(st.just("tick"), st.integers(-100, 100)),
        st.tuples(st.just("keep"), st.integers(0, 2)),
        st.tuples(st.just("kill"), st.integers(1, 5)),
        st.tuples(st.just("kill_after"), st.integers(1, 5)),
        st.tuples(st.just("lease"), st.integers(1, 2)),
        st.tuples(st.just("repeat"), st.integers(0, 50)),
        st.tuples(st.just("stale"), st.integers(0, 50)),
        st.tuples(st.just("give"), st.integers(0, 50)),
        st.tuples(st.just("ack"), st.just(0)),
        st.tuples(st.just("restart"), st.just(0)),
        st.tuples(st.just("return"), st.integers(0, 50)),
        st.tuples(st.just("lose"), st.integers(1, 4)),
    ),
    max_size=40,
)


@settings(max_examples=EXAMPLES, derandomize=True)
@given(histories(), actions, st.integers(0, 2))
def test_the_bank_says_what_the_oracle_says(
    history: list[list[Message]], todo: list[tuple[str, Any]], fairness: int
) -> None:
    bench = Bench(msgspec.structs.replace(RULES, fairness_batches=fairness))
    left = list(history)
    # Whatever is left when the actions are over comes at the end.
    rest = [("put", False)] * len(left)
    for action, value in [*todo, *rest, ("lease", 1), ("restart", 0), ("keep", 0), ("tick", 1)]:
        try:
            _act(bench, left, action, value)
        except Killed:
            bench.restart()
        if bench.refused:  # it says what to restore, and leases nothing
            return
        bench.check_rest()
    bench.check_totals()


def _act(bench: Bench, left: list[list[Message]], action: str, value: Any) -> None:
    if action in ("put", "unread") and left:
        bench.put(left.pop(0), value, read=action == "put")
    elif action in ("repeat", "stale") and bench.fed:
        event = bench.fed[value % len(bench.fed)]
        _former_owner(bench, event) if action == "stale" else bench.feed(event)
    elif action == "tick":  # clocks jump, also backwards
        bench.now += value
        bench.feed(e.Tick())
    elif action.startswith("kill"):
        bench.store.effects_left, bench.store.kill_after = value, action == "kill_after"
    elif action in ("restart", "lose"):
        bench.store.effects_left = None
        bench.records_lost(value) if action == "lose" else bench.restart()
    else:
        _act_as_trainer(bench, action, value)


def _act_as_trainer(bench: Bench, action: str, value: int) -> None:
    if action == "lease" and not bench.asked:
        bench.lease(value)
    elif action == "give" and bench.has > bench.durable and bench.whole:
        bench.give_back(value)
    elif action == "ack" and bench.has and bench.whole:
        bench.acknowledge()
    elif action == "keep" and bench.has and bench.whole:
        bench.acknowledge(value)
    elif action == "return" and bench.has:
        has = bench.has - (not bench.whole)  # no checkpoint has what it gave groups back of
        bench.trainer_returns(bench.kept + 1 + value % (has - bench.kept + 1))


afterthoughts = st.sampled_from([None, None, INFRA, scored(0.0)])


@settings(max_examples=EXAMPLES, derandomize=True)
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
        bench.put(_whole(number), late=False)
        if number < early:
            bench.lease(1)
        if number < early - untrained:
            bench.acknowledge()
    for number, label in enumerate(after):
        if label is not None:
            bench.put(_attempt(number, 1, label), late=False)
    bench.records_lost(lost)
    while not bench.refused and not bench.asked:
        bench.lease(1)
        bench.check_rest()
    if bench.frozen and not bench.refused:
        bench.acknowledge()
        bench.restart()
        bench.trainer_returns(1)  # to a checkpoint before all of them: it gets them all again
        bench.check_rest()


def _whole(number: int) -> list[Message]:
    return [("events", _opened(f"plain-{number}", 1)), *_attempt(number, 0, scored(1.0))]


def _attempt(number: int, which: int, label: OutcomeLabel) -> list[Message]:
    events, said = attempt(EpisodeKey(RUN, f"plain-{number}", 0, which, 1), label, at=float(number))
    return [*(("events", event) for event in events), ("outcomes", said)]


def _former_owner(bench: Bench, event: Any) -> None:
    """A newer attempt, but of an owner that was replaced: as if it had never been said."""
    if not isinstance(event, e.GroupOpened):
        key = msgspec.structs.replace(event.episode, attempt=9, owner_epoch=0)
        bench.feed(msgspec.structs.replace(event, episode=key))


@settings(max_examples=max(50, EXAMPLES // 3), derandomize=True)
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


gives = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.booleans()),
        st.tuples(st.just("give"), st.integers(0, 50)),
        st.tuples(st.just("give"), st.integers(0, 50)),
        st.tuples(st.just("lease"), st.integers(1, 3)),
        st.tuples(st.just("lease"), st.integers(1, 3)),
        st.tuples(st.just("ack"), st.just(0)),
        st.tuples(st.just("keep"), st.integers(0, 2)),
        st.tuples(st.just("kill"), st.integers(1, 4)),
        st.tuples(st.just("kill_after"), st.integers(1, 4)),
        st.tuples(st.just("restart"), st.just(0)),
        st.tuples(st.just("return"), st.integers(0, 50)),
        st.tuples(st.just("lose"), st.integers(1, 4)),
    ),
    min_size=4,
    max_size=40,
)


@settings(max_examples=EXAMPLES, derandomize=True)
@given(st.integers(2, 12), gives, st.integers(0, 2))
def test_what_is_given_back_has_its_fate_and_the_batch_others(
    groups: int, todo: list[tuple[str, Any]], most: int
) -> None:
    """Whatever dies, and whatever the bank forgets: what a checkpoint has is nowhere else."""
    bench = Bench(msgspec.structs.replace(RULES, returns_max=most))
    left = [_whole(number) for number in range(groups)]
    for call in left[: groups // 2]:
        bench.put(call, late=False)
    left = left[groups // 2 :]
    for action, value in [*todo, *[("put", False)] * len(left), ("restart", 0), ("tick", 1)]:
        try:
            _act(bench, left, action, value)
        except Killed:
            bench.restart()
        if bench.refused:
            return
        bench.check_rest()
    given = {g for batch in bench.frozen.values() for g in batch.returned}
    assert given <= {g for g, fate in bench.store.all_fates.items() if fate.fate == "filtered"}
    assert all(batch.revision <= most for batch in bench.frozen.values())
