"""The router's decisions: which group opens, which sibling runs, what a result leads to.

Owns: jobs, groups, episodes, the admission bound, repairs. Promise: pure and replayable; a group
is opened only within the bound and durable before its siblings run; a sibling lost to
infrastructure is repaired by a new attempt, at most `repairs_max` times; results of attempts that
are not the newest are dropped. Does not cover: I/O (driver.py), fates (the bank).
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import ClassVar

from muster.types import EpisodeKey, Fate, Waiting
from services.router import events as e
from services.router import explain as explaining
from services.router.admission import open_groups_max
from services.router.ceiling import InfraCeiling
from services.router.episode import Episode, Phase
from services.router.fleet import Fleet
from services.router.jobs import Failed, Group, Job, JobProgress, JobState
from services.router.launching import (
    awaits_host,
    begin,
    ceiling_of,
    open_group,
    restored_siblings,
)
from services.router.leftovers import unwanted
from services.router.policy import Placement
from services.router.progress import Reason, of_job, waiting_for
from services.router.rules import RouterRules

Commands = list[e.RouterCommand]


class RouterMachine:
    """`handle(event, now) -> commands`; `now` in seconds of a steady clock."""

    name: ClassVar[str] = "router"
    rules_type: ClassVar[type] = RouterRules
    event_type: ClassVar[object] = e.RouterEvent
    tick_type: ClassVar[type] = e.Tick

    def __init__(self, rules: RouterRules):
        self.rules = rules
        self._fleet = Fleet(Placement(rules.move_margin, rules.move_ratio))
        self._jobs: dict[str, Job] = {}
        self._groups: dict[str, Group] = {}
        self._episodes: dict[str, Episode] = {}
        self._waiting: deque[tuple[str, int]] = deque()  # (group, sibling) to launch
        self._restored: defaultdict[str, set[int]] = defaultdict(set)  # job → indexes, at recovery
        self._fates_early: dict[str, Fate] = {}  # told before their group, at recovery
        self._version = self._published_step = 0
        self._steps = 0
        self._recovered, self._resume_by = False, 0.0
        self._found: list[e.BoxesFound] = []  # not looked at yet
        self._ceilings: dict[str, InfraCeiling] = {}
        self._memory = ""  # why Redis's memory stops launches, empty when it does not
        self._watch = explaining.Watch()

    def handle(self, event: e.RouterEvent, now: float) -> Commands:
        """Apply one event and answer what is to be done."""
        commands = self._apply(event, now)
        if isinstance(event, e.RecoveryEnded):
            self._resume_by = now + self.rules.resume_wait_s
        if self._recovered:
            commands += self._open_groups(now)
            commands += self._launch(now)
            commands += self._tidy()
        self._watch_over(event, now)
        return commands

    def _watch_over(self, event: e.RouterEvent, now: float) -> None:
        """Remember since when things stand."""
        if isinstance(event, explaining.PROGRESS):
            self._watch.moved = now
        if isinstance(event, e.Tick):
            self._watch.saw_all(self._episodes, now)
        if isinstance(event, e.EpisodeEvent | e.EpisodeRecorded):
            self._watch.saw(event.episode.id, self._episodes.get(event.episode.id), now)

    def _apply(self, event: e.RouterEvent, now: float) -> Commands:
        match event:
            case e.Tick():
                return self._tick(now)
            case e.JobSubmitted() | e.JobCancelled():
                return self._on_job(event)
            case e.GroupRestored() | e.JobTotals() | e.RecoveryEnded():
                return self._on_recovery(event)
            case e.GroupRecorded() | e.FateRecorded():
                return self._on_group(event)
            case e.VersionPublished() | e.BatchTrained():
                return self._on_policy(event)
            case e.MemoryTold():
                self._memory = event.problem
                return []
            case e.ReplicasListed() | e.HostsListed() | e.BoxesFound():
                return self._on_fleet(event)
            case e.EpisodeRecorded():
                return self._on_episode_recorded(event, now)
            case _:
                return self._on_episode(event, now)

    # -- jobs and groups ---------------------------------------------------------------

    def _on_job(self, event: e.JobSubmitted | e.JobCancelled) -> Commands:
        if isinstance(event, e.JobSubmitted):
            self._jobs.setdefault(event.job.id, Job(event.job))
            self._ceilings.setdefault(event.job.id, ceiling_of(event.job, self.rules))
            return []
        job = self._jobs.get(event.job)
        if job is None or job.state is not JobState.RUNNING:
            return []
        job.cancelled = True
        commands: Commands = []
        for group in [g for g in self._groups.values() if g.job == event.job]:
            commands += self._stop_group(group)
        return commands

    def _stop_group(self, group: Group) -> Commands:
        commands: Commands = []
        for number, sibling in enumerate(group.siblings):
            key = self._key(group, number)
            episode = self._episodes.pop(key.id, None)
            if episode is not None:
                sibling.running = False
                commands += episode.cancel(self._fleet)
            elif sibling.resume is not None:  # a former router's, not gone on with yet
                left, sibling.resume = sibling.resume, None
                commands += [e.ReleaseBox(key, left.host, left.box), e.DropConversation(key)]
        self._waiting = deque(w for w in self._waiting if w[0] != group.id)
        return commands

    def _on_recovery(self, event: e.GroupRestored | e.JobTotals | e.RecoveryEnded) -> Commands:
        match event:
            case e.GroupRestored():
                return self._restore(event)
            case e.JobTotals():
                self._jobs[event.job].retired(event)
                self._restored[event.job].update(event.indexes_retired)
            case e.RecoveryEnded():
                self._recovered = True
                self._fates_early.clear()
                for job in self._jobs.values():
                    # Openings are written at once, so a kill may lose one and keep its successor.
                    restored = self._restored[job.spec.id]
                    job.lost = [n for n in range(job.opened) if n not in restored]
                self._restored.clear()
        return []

    def _on_group(self, event: e.GroupRecorded | e.FateRecorded) -> Commands:
        if isinstance(event, e.FateRecorded):
            return self._on_fate(event)
        group = self._groups.get(event.group)
        if group is not None and not group.recorded:
            group.recorded = True
            self._enqueue(group)
        return []

    def _restore(self, event: e.GroupRestored) -> Commands:
        job = self._jobs[event.job]
        siblings = restored_siblings(event)
        group = Group(event.group, event.job, event.index, job.task_of(event.index), siblings, True)
        job.failed = group.failed or job.failed
        self._groups[group.id] = group
        job.opened = max(job.opened, event.index + 1)
        self._restored[event.job].add(event.index)
        job.complete += group.complete
        for told in event.siblings:
            job.restored(told)
        early = self._fates_early.pop(group.id, None)
        if early is not None:
            return self._on_fate(e.FateRecorded(group.id, early))  # its step was counted before
        if job.cancelled:
            return self._stop_group(group)
        self._enqueue(group)
        return []

    def _enqueue(self, group: Group) -> None:
        job = self._jobs[group.job]
        if not job.cancelled:
            for number, sibling in enumerate(group.siblings):
                if sibling.resume is not None:  # first: its box lives for a while only
                    self._waiting.appendleft((group.id, number))
                elif sibling.label is None:
                    self._waiting.append((group.id, number))

    def _on_fate(self, event: e.FateRecorded) -> Commands:
        # A fate may be told before the batch it belongs to: its slot must not look free till then.
        self._steps = max(self._steps, event.step)
        group = self._groups.get(event.group)
        if group is None:
            if not self._recovered:
                self._fates_early[event.group] = event.fate
            return []
        job = self._jobs[group.job]
        job.trained += event.fate is Fate.TRAINED
        job.filtered += event.fate is Fate.FILTERED
        commands = self._stop_group(group)
        del self._groups[group.id]
        return commands

    def _paused(self, job: Job, now: float) -> Reason:
        """What stops the launches of a job; without a text when nothing does."""
        why = self._ceilings[job.spec.id].why(now)
        return Reason(why) if why else Reason(self._memory, "redis")

    def _open_groups(self, now: float) -> Commands:
        commands: Commands = []
        for job in self._jobs.values():
            if self._paused(job, now).text:
                continue
            while (
                job.state is JobState.RUNNING and job.unopened and len(self._groups) < self._bound()
            ):
                commands.append(self._open(job))
        return commands

    def _open(self, job: Job) -> e.RouterCommand:
        group, command = open_group(job, self._version)
        self._groups[group.id] = group
        return command

    def _bound(self) -> int:
        return open_groups_max(
            lag_max=self.rules.lag_max,
            published_step=self._published_step,
            steps_trained=self._steps,
            groups_per_batch=self.rules.groups_per_batch,
        )

    # -- policy and fleet --------------------------------------------------------------

    def _on_policy(self, event: e.VersionPublished | e.BatchTrained) -> Commands:
        if isinstance(event, e.VersionPublished):
            # Numbers only grow, steps go back with a trainer that rolled back.
            if event.version >= self._version:
                self._version, self._published_step = event.version, event.step
        else:
            self._steps = max(self._steps, event.step)
        return []

    def _on_fleet(self, event: e.ReplicasListed | e.HostsListed | e.BoxesFound) -> Commands:
        match event:
            case e.ReplicasListed():
                self._fleet.replicas_are(event.replicas)
            case e.HostsListed():
                self._fleet.hosts_are(event.hosts)
            case e.BoxesFound():
                self._found.append(event)
        return []

    def _tidy(self) -> Commands:
        """Give back what a former router left and nobody goes on in; after all was told."""
        found, self._found = self._found, []
        epoch = self.rules.owner_epoch
        return [c for one in found for c in unwanted(one, self._groups, self._episodes, epoch)]

    # -- episodes ----------------------------------------------------------------------

    def _launch(self, now: float) -> Commands:
        commands: Commands = []
        early: list[tuple[str, int]] = []  # have their places
        for _ in range(len(self._waiting)):
            if len(self._episodes) + len(early) >= self.rules.episodes_max:
                break
            group_name, number = self._waiting.popleft()
            group = self._groups.get(group_name)
            if group is None or group.siblings[number].running:
                continue
            if now < self._resume_by and awaits_host(group.siblings[number], self._fleet):
                early.append((group_name, number))
                continue
            job = self._jobs[group.job]
            if self._ceilings[group.job].paused(now):
                self._waiting.append((group_name, number))  # keeps its order among its job's
                continue
            key = self._key(group, number)
            episode, asked = begin(key, group, job, self.rules, self._fleet, now)
            self._episodes[episode.id] = episode
            commands += asked
        self._waiting.extendleft(reversed(early))
        return commands

    def _key(self, group: Group, number: int) -> EpisodeKey:
        attempt = group.siblings[number].attempt
        return EpisodeKey(self.rules.run, group.id, number, attempt, self.rules.owner_epoch)

    def _tick(self, now: float) -> Commands:
        commands: Commands = []
        for episode in list(self._episodes.values()):
            commands += episode.on_time(self._fleet, now)
        busy = any(job.state is JobState.RUNNING for job in self._jobs.values())
        if busy and self._watch.stalled(now, self.rules.stall_s):
            # Relative times: a machine knows no wall clock.
            lines = explaining.of_run(self._picture(now, now))
            commands.append(e.TellStall(tuple(lines)))
        return commands

    def _on_episode(self, event: e.EpisodeEvent, now: float) -> Commands:
        episode = self._episodes.get(event.episode.id)
        if episode is None or episode.key != event.episode:
            return self._after_the_end(event)
        replays = episode.replays
        commands = episode.on(event, self._fleet, now)
        group = self._groups.get(episode.key.group)
        if group is not None:
            self._jobs[group.job].repairs += episode.replays - replays
        return commands

    def _after_the_end(self, event: e.EpisodeEvent) -> Commands:
        """An answer that nobody waits for any more: only a box must not be forgotten."""
        if isinstance(event, e.BoxAcquired | e.BoxRefused):
            self._fleet.box_gone(event.host)
        if isinstance(event, e.BoxAcquired):
            return [e.ReleaseBox(event.episode, event.host, event.box)]
        return []

    def _on_episode_recorded(self, event: e.EpisodeRecorded, now: float) -> Commands:
        episode = self._episodes.get(event.episode.id)
        if episode is None or episode.key != event.episode or episode.phase is not Phase.FINISH:
            return []
        del self._episodes[episode.id]
        if episode.box:
            self._fleet.box_gone(episode.host)
        self._fleet.session_over(episode.id)
        self._conclude(episode, now)
        return episode.on_finished()

    def _conclude(self, episode: Episode, now: float) -> None:
        """The attempt's label is durable: the sibling is final, or repaired."""
        group = self._groups.get(episode.key.group)
        label = episode.label
        if group is None or label is None:
            return
        job, sibling = self._jobs[group.job], group.siblings[episode.key.sibling]
        sibling.running = False
        job.finished(label, episode.turns_recorded)
        failed = None if label.outcome.valid else Failed(episode.id, label, now)
        job.failed = sibling.failed = failed
        self._ceilings[group.job].ended(label, now)
        repairs_max = job.spec.policy.repairs(self.rules.repairs_max)
        if not label.outcome.valid and sibling.attempt < repairs_max:
            sibling.attempt += 1
            job.repairs += 1
            self._waiting.append((group.id, episode.key.sibling))
            return
        sibling.label = label
        job.complete += group.complete

    # -- questions ---------------------------------------------------------------------

    def job(self, job: str) -> Job | None:
        return self._jobs.get(job)

    def jobs_running(self) -> int:
        return sum(job.state is JobState.RUNNING for job in self._jobs.values())

    def progress(self, job_id: str, now: float) -> JobProgress | None:
        """What people see of a job; None for an unknown one."""
        job = self._jobs.get(job_id)
        if job is None:
            return None
        return of_job(
            job,
            groups=self._groups,
            episodes=self._episodes,
            version=self._version,
            waiting=self._waiting_for(job, now),
        )

    def _waiting_for(self, job: Job, now: float) -> Reason:
        return waiting_for(
            job,
            groups=self._groups,
            episodes=self._episodes,
            fleet=self._fleet,
            bound=self._bound(),
            rules=self.rules,
            paused=self._paused(job, now),
        )

    def explain(self, subject: str, now: float, unix_now: float, logs: str) -> list[Waiting]:
        """What a run, job, group or episode waits for, outermost first; empty when unknown."""
        return explaining.find(subject, self._picture(now, unix_now, logs))

    def _picture(self, now: float, unix_now: float, logs: str = "logs") -> explaining.Picture:
        return explaining.Picture(
            run=self.rules.run,
            jobs=self._jobs,
            groups=self._groups,
            episodes=self._episodes,
            reasons={id_: self._waiting_for(job, now) for id_, job in self._jobs.items()},
            watch=self._watch,
            now=now,
            unix_now=unix_now,
            logs=logs,
        )
