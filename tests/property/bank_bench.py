"""A bank's machine on a store, with a trainer, and a dumb oracle that says what is right.

The oracle looks at everything that was fed so far and says which groups are whole, with which
attempts, and since when.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from muster.types import Fate, JobPolicy, Outcome, OutcomeLabel
from services.readybank import events as e
from services.readybank.machine import BankMachine
from services.readybank.retire import group_of, keys_of
from tests.scenarios.lossy_store import LossyStore

RULES = e.BankRules(valid_min=1, repairs_max=1, unacknowledged_max=100, retire_at_once=2)
EXAMPLES = int(os.environ.get("MUSTER_TEST_EXAMPLES", "200"))
POLICIES = {
    "plain": JobPolicy(),
    "lax": JobPolicy(repairs_max=0),
    "strict": JobPolicy(valid_min=2, zero_variance="filter"),
    "held": JobPolicy(),  # its groups are an evaluation's
}
EVALUATES = "held"
Message = tuple[str, Any]  # (stream, event)


def rules_of(group: str) -> e.BankRules:
    policy = POLICIES[group.rpartition("-")[0]]
    return e.BankRules(
        valid_min=RULES.valid_min if policy.valid_min is None else policy.valid_min,
        repairs_max=policy.repairs(RULES.repairs_max),
        zero_variance=policy.zero_variance or RULES.zero_variance,
    )


def oracle(fed: Sequence[Any]) -> dict[str, tuple[float, tuple[int, ...], bool]]:
    """Whole groups: since when, which attempts, trainable or not."""
    found = {}
    fed = list({x.id: x for x in fed}.values())
    for group in (x for x in fed if isinstance(x, e.GroupOpened)):
        mine = [
            x for x in fed if not isinstance(x, e.GroupOpened) and x.episode.group == group.group
        ]
        attempts, times = [], [group.at_unix_s]
        rewards: list[float | None] = []
        rules = rules_of(group.group)
        for sibling in range(group.group_size):
            tried = [x for x in mine if x.episode.sibling == sibling]
            newest = max((x.episode.attempt for x in tried), default=-1)
            of = [x for x in tried if x.episode.attempt == newest]
            label = next((x.label for x in of if isinstance(x, e.LabelRecorded)), None)
            end = next((x.turns for x in of if isinstance(x, e.EpisodeRecorded)), None)
            turns = {x.turn for x in of if isinstance(x, e.TurnRecorded)}
            if not _over(label, end, turns, newest, rules.repairs_max):
                break
            attempts.append(newest)
            times += [x.at_unix_s for x in of]
            rewards += [label.reward] if label and label.outcome.valid else []
        else:
            flat = rules.zero_variance == "filter" and len(set(rewards)) == 1
            trainable = len(rewards) >= rules.valid_min and not flat
            trainable = trainable and group.job != EVALUATES
            found[group.group] = (max(times), tuple(attempts), trainable)
    return found


def _over(
    label: OutcomeLabel | None, end: int | None, turns: set[int], number: int, repairs_max: int
) -> bool:
    if label is None:
        return False
    if label.outcome in (Outcome.INFRA_FAILURE, Outcome.UNKNOWN):
        return number >= repairs_max
    return end is not None and turns == set(range(end))


class Bench:
    """A machine, its store, and a trainer that keeps its checkpoints from `kept` on."""

    def __init__(self, rules: e.BankRules = RULES) -> None:
        self.rules, self.store, self.now = rules, LossyStore(), 0.0
        self.fed: list[Any] = []
        self.unread: list[Any] = []
        self.sent: dict[int, e.SendBatch] = {}
        self.asked: dict[int, int] = {}  # step → groups, of the leases that wait
        self.again: e.SendBatch | None = None  # the last batch that was sent
        self.epoch = 1
        self.durable = 0  # newest step in the trainer's checkpoint
        self.kept = 0  # step of its oldest one
        self.has = 0  # newest step that its incarnation was sent
        self.brought: tuple[e.Batch, ...] = ()  # what it says of its steps when it registers
        self.giving: e.ReturnAsked | None = None  # it gives groups back, and has no answer yet
        self.refused = False
        self.restart()

    @property
    def frozen(self) -> dict[int, e.Batch]:
        return self.store.all_batches

    def feed(self, event: e.BankEvent) -> None:
        for command in self.machine.handle(event, self.now):
            self.heard(command)
            result = self.store.write(command)
            if result is not None:
                self.feed(result)

    def heard(self, command: e.BankCommand) -> None:
        if isinstance(command, e.WriteFate):
            self.said[command.fate.group] += 1
            self.check_evaluated(command)
        elif isinstance(command, e.WriteTrained):
            self.said.update(fate.group for fate in command.fates)
        elif isinstance(command, e.WriteReturned):
            self.said.update(fate.group for fate in command.fates)
        elif isinstance(command, e.WriteFrozen):
            if command.batch not in self.brought:
                self.check_choice(command.batch)
        elif isinstance(command, e.SendBatch):
            self.heard_batch(msgspec.structs.replace(command, call="", returns_left=0))
        elif isinstance(command, e.AnswerReturned):
            self.giving = None
        elif isinstance(command, e.RefuseCall) and command.call == "register":
            self.refused = True

    def heard_batch(self, said: e.SendBatch) -> None:
        """It is durable and whole; what was sent before of the same revision was the same."""
        batch, before = said.batch, self.sent.get(said.batch.step)
        self.again = said
        assert batch == self.frozen[batch.step]
        assert not batch.lacks
        if before is None or before.batch.revision < batch.revision:
            self.sent[batch.step] = said
        assert said == self.sent[batch.step]
        assert batch.step > self.kept
        self.asked.pop(batch.step)
        self.has = max(self.has, batch.step)

    def candidates(self) -> list[tuple[bool, float, str, tuple[int, ...]]]:
        """Groups that may be in the next batch, the first to go first."""
        used = {m.group for b in self.frozen.values() for m in b.members} | {*self.store.all_fates}
        used |= set(self.said)
        opened_at = {x.group: x.at_unix_s for x in self.fed if isinstance(x, e.GroupOpened)}
        newest = [self.frozen[s] for s in sorted(self.frozen)[-self.rules.fairness_batches :]]
        passed = [opened_at[m.group] for b in newest for m in b.members]
        count = self.rules.fairness_batches
        bound = min(passed) if 0 < count <= len(newest) else float("-inf")
        found = []
        for group, (at, attempts, ok) in oracle(self.fed).items():
            if ok and group not in used:
                late = opened_at[group] < bound
                found.append((not late, opened_at[group] if late else at, group, attempts))
        return sorted(found)

    def check_choice(self, batch: e.Batch) -> None:
        short = self.frozen.get(batch.step)
        stays = short.members if short else ()
        best = self.candidates()[: short.lacks if short else self.asked[batch.step]]
        fresh = tuple(e.BatchMember(g, a) for _, _, g, a in best)
        assert batch.members == (*stays, *fresh)
        assert not batch.lacks
        whole = oracle(self.fed)
        complete = [whole[g][0] for _, _, g, _ in best]
        assert batch.complete_unix_s == max(
            [short.complete_unix_s, *complete] if short else complete
        )

    def check_evaluated(self, command: e.WriteFate) -> None:
        """All of an evaluation, and nothing else, is evaluated, with the attempts that count."""
        group, found = command.fate.group, command.evaluated
        held = group.rpartition("-")[0] == EVALUATES
        assert (command.fate.fate is Fate.EVALUATED) == held == (found is not None)
        if found is not None:
            _, attempts, _ = oracle(self.fed)[group]
            assert tuple(sibling.attempt for sibling in found.siblings) == attempts

    def check_rest(self) -> None:
        """Nothing that could be said was left unsaid, nothing was said twice."""
        assert not self.store.conflicts
        assert not [group for group, times in self.said.items() if times > 1]
        if self.asked:
            first = min(self.asked)
            short = self.frozen.get(first)
            assert len(self.candidates()) < (short.lacks if short else self.asked[first])
        frozen = [m.group for b in self.frozen.values() for m in b.members]
        assert len(frozen) == len(set(frozen))
        for group, (_, _, trainable) in oracle(self.fed).items():
            assert trainable or group in self.store.all_fates or group in frozen
        if not self.unread:
            self.check_left()

    def check_left(self) -> None:
        """Payloads are there as long as their group is needed, and no longer."""
        fates, mark = self.store.all_fates, self.store.mark
        batched = {m.group: b.step for b in self.frozen.values() for m in b.members}
        over = {g for g, f in fates.items() if batched.get(g, f.step) <= mark}
        if not self.asked and not self.machine.leases.heard:
            over &= self.store.retired  # it waits for a word of the trainer
        assert self.store.retired == over
        keys = {key for x in self.fed if group_of(x) not in over for key in keys_of(x)}
        assert self.store.payloads == keys

    def check_totals(self) -> None:
        """What was counted when groups went is what the streams said of them."""
        whole = Counter[str]()
        for x in {x.id: x for x in self.fed}.values():
            if group_of(x) in self.store.retired and isinstance(x, e.LabelRecorded):
                job = group_of(x).rpartition("-")[0]
                whole[f"{job} episodes"] += 1
                whole[f"{job} outcome:{x.label.outcome}"] += 1
        for group in self.store.retired:
            fate = self.store.all_fates[group].fate
            whole[f"{group.rpartition('-')[0]} {fate}"] += 1
        counted = {
            f"{j} {k}": v for j, totals in self.store.totals.items() for k, v in totals.items()
        }
        for name in (*counted, *whole):
            if not name.endswith((" turns", " repairs")):
                assert counted.get(name, 0) == whole[name], name

    def put(self, call: list[Message], late: bool, read: bool = True) -> None:
        """Append a call's messages and feed them; `late` reverses the streams."""
        taken = [entry for s, event in call if (entry := self.store.put(s, event)) is not None]
        self.unread += reversed(taken) if late else taken
        if read:
            self.read()

    def read(self) -> None:
        """The bank reads all that it has not read yet."""
        while self.unread:
            event = self.unread.pop(0)
            self.fed.append(event)
            self.feed(event)

    def lease(self, groups: int) -> None:
        self.ask(self.has + 1, groups)

    def ask(self, step: int, groups: int) -> None:
        self.asked[step] = groups
        self.feed(e.LeaseAsked(self.epoch, step, groups, "lease", 0.0))

    def give_back(self, which: int) -> None:
        """The trainer gives a group of its newest batch back, or two, and leases the step again."""
        members = self.sent[self.has].batch.members
        chosen = {members[which % len(members)].group, members[which // 7 % len(members)].group}
        groups = tuple(e.GivenBack(group, "kl") for group in sorted(chosen))
        self.giving = e.ReturnAsked(self.epoch, self.has, groups, "return")
        self.feed(self.giving)
        self.ask_again()

    def ask_again(self) -> None:
        """For the step that lacks groups now; a lease of the next may be open."""
        short = self.frozen.get(self.has)
        free = self.has not in self.asked and self.giving is None and self.has > self.durable
        if free and short and short.lacks:
            self.ask(self.has, len(short.members) + short.lacks)

    @property
    def whole(self) -> bool:
        """What the trainer has may be trained on."""
        return self.giving is None and self.has not in self.asked

    def restart(self) -> None:
        self.machine, self.said = BankMachine(self.rules), Counter[str]()
        self.fed, self.unread = [*self.fed, *self.unread], []
        for event in self.store.recovery():
            self.feed(event)
        for step, groups in sorted(self.asked.items()):
            self.ask(step, groups)
        if self.giving is not None:
            self.feed(self.giving)
        self.ask_again()

    def acknowledge(self, behind: int | None = None) -> None:
        """All that was sent is in a checkpoint; `behind`: how many steps the oldest one is back."""
        self.durable = self.has
        if behind is not None:
            self.kept = max(self.kept, self.durable - behind)
        self.feed(e.AckAsked(self.epoch, self.durable, "ack", self.kept))

    def trainer_returns(self, step: int) -> None:
        """A new incarnation whose checkpoint ends before `step` gets what the former one got."""
        self.epoch += 1
        self.asked, self.giving = {}, None
        self.durable = self.has = step - 1
        self.brought = self.kept_batches()
        register = e.TrainerRegistered(
            self.epoch,
            self.durable,
            "register",
            self.brought,
            self.kept,
        )
        self.feed(register)
        if self.refused:
            return
        for batch in self.brought:
            assert self.frozen[batch.step] == batch
        for again in range(step, max(self.frozen, default=0) + 1):
            self.again = None
            lacks = self.frozen[again].lacks
            self.ask(again, 1)
            if lacks and self.again is None:
                self.has = again
                return  # it waits for others in the place of what was given back
            assert self.again == self.sent[again]

    def kept_batches(self) -> tuple[e.Batch, ...]:
        """Of the checkpoint: its newest, and all from one on of which groups were given back."""
        has = [s.batch for step, s in sorted(self.sent.items()) if step <= self.durable]
        revised = [batch.step for batch in has if batch.revision]
        first = min([self.durable, *revised])
        return tuple(batch for batch in has if batch.step >= first)

    def records_lost(self, count: int) -> None:
        """The bank's last records are gone and it restarts; the trainer's checkpoint is not gone.

        Then no group of any step of the checkpoint is ever leased again, or nothing is.
        """
        self.store.lose(count)
        brought = {batch.step for batch in self.kept_batches()}
        known = set(self.frozen) | brought
        self.sent = {
            step: sent
            for step, sent in self.sent.items()
            if step in brought or self.frozen.get(step) == sent.batch
        }
        self.asked, self.giving = {}, None
        self.restart()
        self.trainer_returns(self.durable + 1)
        assert self.refused == any(step not in known for step in range(1, self.durable))
        if not self.refused:
            self.restart()
