"""The planted bugs: each one plausible, each one seen by fault seeds alone.

Owns: the list. Promise: one bug per kind of mistake that a system like this is known to make
(acknowledged before the effect, no fence, leadership by time alone, records trimmed blindly, lag
of the last token, late answers, credits that never end …). Does not cover: bugs of functions that
no simulation runs (mutants.py).
"""

from __future__ import annotations

from tests.faults.planting import Bug, Edit
from tests.faults.plants_replicas import REPLICAS, SEATS

_ROUTER = "services.router"
_BANK = "services.readybank"

RECORDS = (
    Bug(
        "acknowledged_before_effect",
        "a batch is acknowledged before the checkpoint that has it is durable",
        (
            Edit(
                "services.trainer.schedule:TrainerMachine._on_trained",
                "return [make(",
                "return [AcknowledgeBatch(report.step, self._oldest_kept), make(",
            ),
        ),
        r"2: |raised|halts|13: ",
    ),
    Bug(
        "leads_by_time_alone",
        "a bank writes without its epoch: only its key in the store says that it leads",
        (Edit("sim.bank:Bank.lead", 'role="readybank", epoch=self.epoch', 'role="readybank"'),),
        r"3: .*former readybank",
        "STOPPED",
    ),
    Bug(
        "owners_not_fenced_by_hosts",
        "a host obeys former owners",
        (
            Edit(
                "services.sandbox.owners:Owners.fence",
                "epoch >= known.epoch",
                "epoch >= 0",
            ),
        ),
        r"8: .*former owner",
        "STOPPED",
    ),
    Bug(
        "owners_not_fenced_by_replicas",
        "a replica samples for a former owner",
        (
            Edit(
                "sim.engine:Replica.generate",
                "if key.owner_epoch < self.owner_epoch:",
                "if key.owner_epoch < 0:",
            ),
        ),
        r"8: .*former owner",
        "STOPPED",
    ),
    Bug(
        "trimmed_blindly",
        "streams are trimmed below what was read, whether its groups are over or not",
        (
            Edit(
                f"{_BANK}.retire:Retiring._first_kept",
                "next(iter(self._first[stream].values()), self._newest[stream])",
                "self._newest[stream]",
            ),
        ),
        r"1: .*(not over|not archived)",
    ),
    Bug(
        "trimmed_by_length",
        "a stream keeps its newest 150 entries, as with MAXLEN",
        (
            Edit(
                "sim.streams:Store._add",
                "stream.append(message)",
                "stream.append(message); del stream[:-150]",
            ),
        ),
        r"(1|2|3|4|11|13): |raised",
    ),
    Bug(
        "dedupe_by_time",
        "an append that is repeated after a lost reply is written again",
        (
            Edit(
                f"{_ROUTER}.adapters.durable:_entry",
                'return StreamEntry(stream, f"g:{key.group}", dedupe,',
                'return StreamEntry(stream, f"g:{key.group}", f"{dedupe}@{wall()}",',
            ),
        ),
        r"(2|11|1|13): |raised",
    ),
    Bug(
        "lag_from_the_last_token",
        "staleness counted from the last sampled token instead of the first",
        (
            Edit(
                "services.trainer.lineage:trajectory_lag",
                "return lags[0]",
                "return lags[-1]",
            ),
        ),
        r"5: .* has a lag",
    ),
    Bug(
        "late_attempt_taken",
        "the bank takes what an older attempt still says for the newest one's",
        (
            Edit(
                f"{_BANK}.assembly:GroupAssembly._refusal",
                "key.attempt < known.number",
                "key.attempt < 0",
            ),
            Edit(f"{_BANK}.machine:BankMachine._fenced", "if owner_epoch <", "if 0 >"),
        ),
        r"(1|2|3|4|13): |raised",
    ),
    Bug(
        "frozen_twice",
        "a batch that is being written is composed again",
        (
            Edit(
                f"{_BANK}.lease:Leases.batch",
                "(self.frozen, self.freezing, self.short, self.returning)",
                "(self.frozen, self.short, self.returning)",
            ),
        ),
        r"2: |raised|13: ",
        "BACKLOG",
    ),
    Bug(
        "sent_before_durable",
        "a batch is sent before its composition is durable",
        (
            Edit(
                f"{_BANK}.lease:Leases.freeze",
                "self._first_asked.pop(batch.step, None)",
                "self.frozen[batch.step] = batch",
            ),
        ),
        r"2: ",
    ),
    Bug(
        "fate_lost",
        "a group that is filtered is closed, and its fate is not written",
        (
            Edit(
                f"{_BANK}.machine:BankMachine.filter",
                "return [e.WriteFate(fate)]",
                "return []",
            ),
        ),
        r"13: ",
        "LOSSY",
    ),
    Bug(
        "version_never_recorded_again",
        "a trainer that lives on does not see that a power cut took its newest records",
        (
            Edit(
                "services.trainer.schedule:TrainerMachine._on_server_restarted",
                "[*self._recorded]",
                "[]",
            ),
        ),
        r"5: .*of no record",
        "FORGETFUL",
    ),
    Bug(
        "payloads_gone_at_acknowledgement",
        "tokens go once trained, though the trainer may go back to an older checkpoint",
        (
            Edit(
                f"{_BANK}.lease:Leases.markable",
                "min(self.oldest_kept, self.last_durable)",
                "self.last_durable",
            ),
        ),
        r"1: .*may go back|13: |raised|2: ",
    ),
)

EPISODES = (
    Bug(
        "intent_after_the_command",
        "a command runs before that it will run is durable",
        (
            Edit(
                f"{_ROUTER}.episode:Episode._intend",
                "return [\n",
                "return [\n            *self._exec(),\n",
            ),
        ),
        r"11: |raised|13: ",
    ),
    Bug(
        "step_run_again",
        "a repeated call runs its command again instead of telling the kept result",
        (
            Edit(
                "services.sandbox.ledger:Ledger.decide",
                "return Decision.REPEAT",
                "return Decision.RUN",
            ),
        ),
        r"11: |raised",
    ),
    Bug(
        "attempt_begun_again",
        "a router that takes over begins each attempt anew, under its old number",
        (
            Edit(
                f"{_ROUTER}.recovery:_restore",
                "if newest.turns or newest.intents else None",
                "if newest.finished else None",
            ),
        ),
        r"(1|2|11): |raised",
    ),
    Bug(
        "repair_counted_twice",
        "an attempt that is lost uses up two repairs",
        (
            Edit(
                f"{_ROUTER}.groups:Groups.ended",
                "sibling.attempt += 1",
                "sibling.attempt += 2",
            ),
        ),
        r"(1|12): ",
    ),
    Bug(
        "repairs_unbounded",
        "a box is rebuilt as often as it is lost",
        (
            Edit(
                f"{_ROUTER}.attempt:Attempt._restore_box",
                "self._rebuilds >= self._replays_max",
                "self._rebuilds >= 100",
            ),
        ),
        r"12: ",
        "LOSSY",
    ),
    Bug(
        "box_released_early",
        "a box is given back before its attempt's label is durable",
        (
            Edit(
                f"{_ROUTER}.attempt:Attempt._finish",
                "return [\n",
                "return [\n            e.ReleaseBox(self.key, self.host, self.box),\n",
            ),
        ),
        r"20: ",
    ),
    Bug(
        "group_left_out",
        "every seventh group is never launched",
        (
            Edit(
                f"{_ROUTER}.groups:Groups._enqueue",
                "if self.jobs[group.job].cancelled:",
                "if self.jobs[group.job].cancelled or group.index % 7 == 3:",
            ),
        ),
        r"13: ",
    ),
    Bug(
        "filtered_slot_kept",
        "a group that was filtered keeps its place within the bound",
        (
            Edit(
                f"{_ROUTER}.groups:Groups.fated",
                "group = self.open.pop(event.group, None)",
                "group = self.open.get(event.group) if event.fate is Fate.FILTERED "
                "else self.open.pop(event.group, None)",
            ),
        ),
        r"13: |raised",
        "LOSSY",
    ),
)

BUGS: tuple[Bug, ...] = (*RECORDS, *EPISODES, *REPLICAS, *SEATS)
