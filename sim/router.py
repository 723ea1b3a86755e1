"""The real RouterMachine in the world, with replicas, hosts and boxes that take time and fail.

A kill gives the router a new owner epoch; what the former one still has under way is refused by
the store, as the append script does.
"""

from __future__ import annotations

from typing import Any

from muster.types import FinishReason, SamplingParams, StepLimit, VerdictStatus, VersionSpan
from services.readybank import events as bank
from services.router import events as e
from services.router.machine import RouterMachine
from services.router.recovery import AttemptSeen, restore_siblings
from services.router.rules import RouterRules
from sim.bank import Bank
from sim.builders import RUN
from sim.models import Model, spread
from sim.store import RunStore
from sim.world import World

JOB = "job"
TOKENS = 8  # per turn
_TASK = e.TaskInfo("task", "digest", "do it")


class Router:
    """One incarnation after the other; `attempts` counts boxes that were handed out."""

    def __init__(self, world: World, store: RunStore, reader: Bank, model: Model):
        self.world, self.store, self.reader, self.model = world, store, reader, model
        self.attempts = 0
        self._boxes = 0
        self.start()
        self._tick()

    def start(self) -> None:
        """A new owner of the run: reads the streams, then goes on."""
        self.store.owner_epoch += 1
        self.epoch = self.store.owner_epoch
        self._told: set[tuple[str, object]] = set()
        model = self.model
        self.rules = RouterRules(
            RUN, self.epoch, groups_per_batch=model.groups_per_batch, lag_max=model.lag_max
        )
        self.machine = RouterMachine(self.rules)
        spec = e.JobSpec(JOB, (_TASK,), model.groups, model.group_size, SamplingParams(), 0.0)
        self.feed(e.JobSubmitted(spec))
        self.follow(restored=False)
        for event in self._restored():
            self.feed(event)
        self.feed(e.ReplicasListed(tuple(e.Replica(f"r{n}", "") for n in range(model.replicas))))
        self.feed(e.HostsListed(tuple(e.Host(f"h{n}", "") for n in range(model.hosts))))
        self.feed(e.RecoveryEnded())

    def _restored(self) -> list[e.GroupRestored]:
        opened = [x for x in self.store.streams["events"] if isinstance(x, bank.GroupOpened)]
        found = []
        for group in sorted(opened, key=lambda x: x.group):
            of = self._events_of(group.group)
            labels = {
                (x.episode.sibling, x.episode.attempt): x.label
                for x in of
                if isinstance(x, bank.LabelRecorded)
            }
            seen = [
                AttemptSeen(*place, finished=place in labels)
                for place in sorted({(x.episode.sibling, x.episode.attempt) for x in of})
            ]
            siblings = restore_siblings(group.group_size, seen, labels, self.rules.repairs_max)
            index = int(group.group.rpartition("-")[2])
            found.append(e.GroupRestored(group.group, JOB, index, siblings))
        return found

    def _events_of(self, group: str) -> list[Any]:
        read: list[Any] = [*self.store.streams["events"], *self.store.streams["outcomes"]]
        return [x for x in read if hasattr(x, "episode") and x.episode.group == group]

    @property
    def idle(self) -> bool:
        """No episode runs."""
        job = self.machine.progress(JOB)
        return job is not None and job.episodes_running == 0

    def feed(self, event: e.RouterEvent) -> None:
        commands = self.machine.handle(event, self.world.now)
        self.world.record("router", event, commands)
        for command in commands:
            self._execute(command)

    def follow(self, restored: bool = True) -> None:
        """Fates, ends of steps and versions that flowed back since."""
        news: list[tuple[tuple[str, object], e.RouterEvent]] = [
            (("fate", f.group), e.FateRecorded(f.group, f.fate, f.step))
            for f in self.store.fates.values()
        ]
        news += [(("step", s), e.BatchTrained(s)) for s in sorted(self.store.trained)]
        for seen in self.store.streams["versions"]:
            if isinstance(seen, bank.VersionSeen) and seen.published:
                news.append(
                    (("version", seen.version), e.VersionPublished(seen.version, seen.version))
                )
        for name, event in news:
            if name not in self._told:
                self._told.add(name)
                if restored:
                    self._later(event, self.model.deliver_s)
                else:
                    self.feed(event)

    def _tick(self) -> None:
        self.feed(e.Tick())
        self.follow()
        self.world.after(0.5, self._tick)

    def _later(self, event: e.RouterEvent, mean_s: float) -> None:
        """An event of this incarnation; it is lost when the router is killed before."""
        epoch = self.epoch
        wait = spread(self.world.rng, mean_s)
        self.world.after(wait, lambda: self.feed(event) if epoch == self.epoch else None)

    def _execute(self, command: e.RouterCommand) -> None:
        model, chance, now = self.model, self.world.chance, self.world.now
        match command:
            case e.OpenGroup() | e.RecordTurn() | e.RecordEpisode():
                epoch = self.epoch
                self.world.after(
                    spread(self.world.rng, model.write_s), lambda: self._write(command, epoch)
                )
            case e.AcquireBox():
                if chance(model.box_refused):
                    no = e.BoxRefused(command.episode, command.host, "full", chance(0.8))
                    self._later(no, model.box_s)
                else:
                    self._boxes += 1
                    self.attempts += 1
                    box = f"b{self._boxes}"
                    yes = e.BoxAcquired(command.episode, command.host, box, now, now)
                    self._later(yes, model.box_s)
            case e.Generate():
                self._later(self._reply(command), model.generate_s)
            case e.Exec():
                self._later(self._stepped(command), model.step_s)
            case e.Verify():
                self._later(self._verdict(command), model.verify_s)
            case _:
                pass  # nothing comes back

    def _reply(self, command: e.Generate) -> e.RouterEvent:
        if self.world.chance(self.model.generate_failed):
            return e.GenerateFailed(command.episode, command.turn, command.replica, "gone")
        text = "DONE" if self.world.chance(self.model.done) else "```bash\ntrue\n```"
        now = self.world.now
        return e.Generated(
            episode=command.episode,
            turn=command.turn,
            text=text,
            finish=FinishReason.STOP,
            prompt_tokens=TOKENS,
            sampled_tokens=TOKENS,
            start_unix_s=now,
            queue_s=0.0,
            prefill_s=0.0,
            end_unix_s=now,
        )

    def _stepped(self, command: e.Exec) -> e.RouterEvent:
        if self.world.chance(self.model.box_lost):
            return e.StepFailed(command.episode, command.turn, "box lost")
        now = self.world.now
        return e.StepFinished(
            episode=command.episode,
            turn=command.turn,
            exit_code=0,
            limit=StepLimit.NONE,
            wall_s=0.0,
            cpu_s=0.0,
            output="",
            box_broken=False,
            start_unix_s=now,
            end_unix_s=now,
        )

    def _verdict(self, command: e.Verify) -> e.RouterEvent:
        if self.world.chance(self.model.verify_failed):
            return e.VerifyFailed(command.episode, "host away")
        reward = 1.0 if self.world.chance(self.model.solved) else 0.0
        now = self.world.now
        return e.VerdictGiven(command.episode, VerdictStatus.REWARDED, reward, "", now, now)

    def _write(self, command: e.OpenGroup | e.RecordTurn | e.RecordEpisode, epoch: int) -> None:
        """An append, perhaps repeated after a lost reply."""
        entries, event = self._entries(command, epoch)
        for _ in range(1 + self.world.chance(self.model.repeated)):
            written = self.store.append(entries, epoch)
        if written:
            self.reader.poll()
            self._later(event, self.model.write_s)

    def _entries(
        self, command: e.OpenGroup | e.RecordTurn | e.RecordEpisode, epoch: int
    ) -> tuple[list[tuple[str, str, bank.BankEvent]], e.RouterEvent]:
        at = self.world.now
        if isinstance(command, e.OpenGroup):
            c = command
            opened = bank.GroupOpened(c.group, c.job, c.task, c.group_size, c.sampling, epoch, at)
            return [("events", c.group, opened)], e.GroupRecorded(c.group)
        key = command.episode
        if isinstance(command, e.RecordTurn):
            version = self._served()
            spans = (VersionSpan(version, 0, TOKENS, version),)
            name = f"{key.id}/{command.turn}"
            turn = bank.TurnRecorded(key, command.turn, name, TOKENS, spans, at)
            return [("events", name, turn)], e.TurnRecorded(key, command.turn)
        end = bank.EpisodeRecorded(key, command.turns, at)
        label = bank.LabelRecorded(key, command.label, at)
        entries: list[tuple[str, str, bank.BankEvent]] = [
            ("events", f"{key.id}/{command.turns}", end),
            ("outcomes", key.id, label),
        ]
        return entries, e.EpisodeRecorded(key)

    def _served(self) -> int:
        """The version that every replica serves."""
        seen = [x for x in self.store.streams["versions"] if isinstance(x, bank.VersionSeen)]
        return max((x.version for x in seen if x.published), default=0)
