"""Stories of the bank as text: bank_*.txt holds blocks of `input ---- output`.

Verbs (name=value arguments may be left out):
  rules NAME=VALUE...              a fresh machine and store; the default rules without it
  open GROUP SIZE                  [job= owner= at= valid_min= repairs_max= zero_variance=]
  attempt GROUP.SIBLING.ATTEMPT LABEL   [turns= version= owner= at= only=events|label]
                                   LABEL: a reward, infra or unknown
  intend GROUP.SIBLING.ATTEMPT TURN     its command is about to run
  version N                        [parent= published=1]
  cancel JOB
  register | lease | ack           [epoch= step= groups= durable= batch=a[0,1];b[0] kept=
                                   revision= former=]
  return STEP GROUP...             [epoch=]; GROUP or GROUP:KL
  scored GROUP SIBLING:KL...       [version= tokens=] an idle replica says so
  missed GROUP                     nobody scored it
  gone CALL
  tick SECONDS
  writes off | on                  off: the bank is killed before its writes land
  writes held, land                held: they land at the next `land`
  lose N                           the last N effects of the bank are gone from the store
  kill N                           the bank is killed at its N-th effect from now; then restart
  unreadable STREAM ID             an entry that means nothing
  restart                          a new bank reads the store
  show                             where things stand
  store                            what Redis holds
  explain                          [group=]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from muster.types import EpisodeKey, JobPolicy, Waiting
from services.readybank import events as e
from services.readybank import explain
from services.readybank.explain import waits_for
from services.readybank.machine import BankMachine
from sim.builders import INFRA, RUN, UNKNOWN, attempt, opened, scored
from tests.scenarios import playing
from tests.scenarios.lossy_store import Killed, LossyStore
from tests.scenarios.playing import check

HERE = Path(__file__).parent


class Story(playing.Story):
    """Runs the lines of one file."""

    def __init__(self) -> None:
        self.rules, self.store, self.now, self.calls = e.BankRules(), LossyStore(), 0.0, 0
        self.machine = BankMachine(self.rules)
        self.machine.handle(e.RecoveryEnded(), 0.0)
        self.writes = "on"
        self.held: list[e.BankCommand] = []

    def feed(self, event: e.BankEvent) -> list[str]:
        """The commands, and those that their results led to."""
        said: list[str] = []
        for command in self.machine.handle(event, self.now):
            said.append(tell(command))
            if self.writes == "held":
                self.held.append(command)
            elif self.writes == "on":
                said += self.land(command)
        return said

    def land(self, command: e.BankCommand) -> list[str]:
        try:
            result = self.store.write(command)
        except Killed:
            self.writes = "off"
            return ["killed"]
        return self.feed(result) if result is not None else []

    def put(self, stream: str, event: e.BankEvent) -> list[str]:
        entry = self.store.put(stream, event)
        return ["not taken: the group is retired"] if entry is None else self.feed(entry)

    def do_rules(self, **named: str) -> list[str]:
        kinds = {f: type(getattr(e.BankRules(), f)) for f in e.BankRules.__struct_fields__}
        self.__init__()  # type: ignore[misc]
        self.rules = e.BankRules(**{k: kinds[k](v) for k, v in named.items()})
        self.machine = BankMachine(self.rules)
        self.machine.handle(e.RecoveryEnded(), 0.0)
        return []

    def do_open(
        self, group: str, size: str, job: str = "", owner: str = "1", at: str = "0", **policy: str
    ) -> list[str]:
        job = job or group.rpartition("-")[0] or "job"
        event = opened(group, int(size), job=job, owner=int(owner), at=float(at))
        wanted: dict[str, Any] = {
            k: v if k == "zero_variance" else int(v) for k, v in policy.items()
        }
        return self.put("events", replace(event, policy=JobPolicy(**wanted)))

    def do_intend(self, where: str, turn: str, at: str = "0") -> list[str]:
        group, sibling, number = where.rsplit(".", 2)
        key = EpisodeKey(RUN, group, int(sibling), int(number), 1)
        name = f"p:{key.id}.{turn}"
        return self.put("events", e.TurnIntended(key, int(turn), name, float(at)))

    def do_attempt(self, where: str, label: str, only: str = "", **named: str) -> list[str]:
        group, sibling, number = where.rsplit(".", 2)
        key = EpisodeKey(RUN, group, int(sibling), int(number), int(named.get("owner", 1)))
        judged = {"infra": INFRA, "unknown": UNKNOWN}.get(label) or scored(float(label))
        turns, version = int(named.get("turns", 1)), int(named.get("version", 0))
        at = float(named.get("at", 0))
        events, said = attempt(key, judged, turns=turns, version=version, at=at)
        lines = (
            [] if only == "label" else [x for event in events for x in self.put("events", event)]
        )
        return lines if only == "events" else lines + self.put("outcomes", said)

    def do_version(
        self, number: str, parent: str = "", published: str = "", kl: str = ""
    ) -> list[str]:
        before, moved = int(parent or int(number) - 1), float(kl) if kl else None
        return self.put("versions", e.VersionSeen(int(number), before, bool(published), moved))

    def do_return(self, step: str, *groups: str, epoch: str = "1") -> list[str]:
        given = [
            (name, float(kl) if kl else None) for name, _, kl in (g.partition(":") for g in groups)
        ]
        back = tuple(e.GivenBack(name, "kl", kl) for name, kl in given)
        return self.feed(e.ReturnAsked(int(epoch), int(step), back, self.call("return")))

    def do_scored(
        self, group: str, *siblings: str, version: str = "", tokens: str = "4"
    ) -> list[str]:
        newest = int(version) if version else self.machine.lineage.newest
        found = [(int(number), float(kl)) for number, _, kl in (s.partition(":") for s in siblings)]
        scores = tuple(e.Score(number, 0, newest, int(tokens), kl) for number, kl in found)
        return self.feed(e.GroupScored(group, scores))

    def do_missed(self, group: str) -> list[str]:
        return self.feed(e.ScoreMissed(group, "no replica is idle"))

    def do_cancel(self, job: str) -> list[str]:
        return self.put("jobs", e.JobCancelled(job))

    def call(self, kind: str) -> str:
        self.calls += 1
        return f"{kind}-{self.calls}"

    def do_register(
        self,
        epoch: str = "1",
        durable: str = "0",
        batch: str = "",
        kept: str = "0",
        revision: str = "0",
    ) -> list[str]:
        last, told = int(durable), batch.split("/") if batch else []
        batches = tuple(
            e.Batch(step, tuple(map(_member, members.split(";"))), 0.0, 0.0, 1, 0, int(revision))
            for step, members in enumerate(told, last + 1 - len(told))
        )
        return self.feed(
            e.TrainerRegistered(int(epoch), last, self.call("register"), batches, int(kept))
        )

    def do_lease(
        self, step: str, groups: str = "1", epoch: str = "1", former: str = ""
    ) -> list[str]:
        call, revision = self.call("lease"), int(former) if former else None
        asked = e.LeaseAsked(int(epoch), int(step), int(groups), call, self.now, revision)
        return self.feed(asked)

    def do_ack(self, step: str, epoch: str = "1", kept: str = "0", revision: str = "") -> list[str]:
        told = int(revision) if revision else None
        return self.feed(e.AckAsked(int(epoch), int(step), self.call("ack"), int(kept), told))

    def do_gone(self, call: str) -> list[str]:
        return self.feed(e.LeaseGone(call))

    def do_tick(self, seconds: str) -> list[str]:
        self.now += float(seconds)
        return self.feed(e.Tick())

    def do_writes(self, state: str) -> list[str]:
        self.writes = state
        return []

    def do_land(self) -> list[str]:
        self.writes, held, self.held = "on", self.held, []
        return [line for command in held for line in self.land(command)]

    def do_lose(self, records: str) -> list[str]:
        self.store.lose(int(records))
        return []

    def do_unreadable(self, stream: str, id: str) -> list[str]:
        return self.feed(e.EntryLeftOut(stream, id))

    def do_kill(self, effects: str) -> list[str]:
        self.store.effects_left = int(effects)
        return []

    def do_restart(self) -> list[str]:
        self.writes = "on"
        self.machine = BankMachine(self.rules)
        return [line for event in self.store.recovery() for line in self.feed(event)]

    def do_show(self) -> list[str]:
        refused = " ".join(f"{k}={v}" for k, v in sorted(self.machine.refused.items()))
        fates = " ".join(f"{f.group}:{f.fate}@{f.step}" for f in self.store.fates.values())
        return [waits_for(self.machine), f"refused: {refused}", f"fates: {fates}"]

    def do_store(self) -> list[str]:
        store = self.store
        counts = " ".join(f"{name} {len(found)}" for name, found in store.streams.items())
        fates, steps = " ".join(sorted(store.fates)), " ".join(map(str, sorted(store.batches)))
        lines = [f"streams: {counts}; batches {steps}; fates {fates}"]
        lines.append(f"mark {store.mark}; retired {' '.join(sorted(store.retired))}")
        lines.append(f"payloads: {' '.join(sorted(store.payloads))}")
        for job, totals in sorted(store.totals.items()):
            lines.append(f"{job}: {' '.join(f'{k}={v}' for k, v in sorted(totals.items()))}")
        return [*lines, *store.conflicts]

    def do_explain(self, group: str = "") -> list[str]:
        if group:
            return [_line(found) for found in explain.group(self.machine, group) or []]
        lines, groups = explain.batch(self.machine)
        return [*(_line(found) for found in lines), f"open groups: {' '.join(groups)}"]


def _line(found: Waiting) -> str:
    told = f"{found.subject}: {found.state}; waits for {found.waits_for or 'nothing'}"
    return f"{told}; since {found.since_unix_s:g}; {found.owner}; {found.next_command}"


def tell(command: Any) -> str:
    """One decision as a line."""
    if isinstance(command, e.WriteReturned | e.ScoreGroup | e.AnswerReturned):
        return _tell_drift(command)
    if isinstance(command, e.WriteFrozen):
        return f"write frozen step {_named(command.batch)}: {_members(command.batch)}"
    if isinstance(command, e.WriteTrained):
        return f"write trained step {command.batch.step}: {_members(command.batch)}"
    if isinstance(command, e.WriteFate):
        fate = command.fate
        return f"write fate {fate.group}: {fate.fate}, {fate.reason}{_kls(fate)}"
    if isinstance(command, e.SendBatch):
        return f"send {command.call} step {_named(command.batch)}: {_members(command.batch)}"
    if isinstance(command, e.AnswerRegistered):
        return f"answer {command.call}: unseen {[*command.steps_unseen]}, next {command.next_step}"
    if isinstance(command, e.AnswerAcknowledged):
        return f"answer {command.call}: {command.groups_trained} groups trained"
    if isinstance(command, e.RefuseCall):
        kind = "fence" if command.fenced else "refuse"
        where = f"{command.field} = {command.value}"
        return f"{kind} {command.call}: {where}: {command.problem} → {command.way_out}"
    if isinstance(command, e.WriteMark | e.RetireGroups | e.TrimStreams):
        return _tell_clearing(command)
    assert isinstance(command, e.TellStall)
    return f"stall: {command.problem}"


def _tell_drift(command: e.WriteReturned | e.ScoreGroup | e.AnswerReturned) -> str:
    if isinstance(command, e.ScoreGroup):
        wanted = " ".join(f"{s.sibling}.{s.attempt}" for s in command.siblings)
        return f"score {command.group} under version {command.version}: {wanted}"
    if isinstance(command, e.AnswerReturned):
        return f"answer {command.call}: {command.returned} groups are back"
    fates = " ".join(f"{f.group}:{f.reason}{_kls(f)}" for f in command.fates)
    return f"write returned step {_named(command.batch)}: {_members(command.batch)}; {fates}"


def _tell_clearing(command: e.WriteMark | e.RetireGroups | e.TrimStreams) -> str:
    if isinstance(command, e.WriteMark):
        return f"write mark {command.step}"
    if isinstance(command, e.RetireGroups):
        told = (f"{g.group} (deletes {' '.join(g.keys) or 'nothing'})" for g in command.groups)
        return f"retire {', '.join(told)}"
    return f"trim events below {command.events}, outcomes below {command.outcomes}"


def _member(text: str) -> e.BatchMember:
    group, _, attempts = text.rstrip("]").partition("[")
    return e.BatchMember(group, tuple(int(attempt) for attempt in attempts.split(",")))


def _named(batch: e.Batch) -> str:
    return f"{batch.step} revision {batch.revision}" if batch.revision else str(batch.step)


def _kls(fate: e.FateRecord) -> str:
    found = (
        ("predicted", fate.predicted_kl),
        ("scored", fate.scored_kl),
        ("measured", fate.measured_kl),
    )
    return "".join(f" {name} {kl:.3g}" for name, kl in found if kl is not None)


def _members(batch: e.Batch) -> str:
    return " ".join(f"{m.group}{list(m.attempts)}".replace(" ", "") for m in batch.members)


@pytest.mark.parametrize("path", sorted(HERE.glob("bank_*.txt")), ids=lambda p: p.stem)
def test_story(path: Path, request: pytest.FixtureRequest) -> None:
    check(Story(), path, request)
