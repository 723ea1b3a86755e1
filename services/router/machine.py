"""The router's decisions: which group opens, which sibling runs, what a result leads to.

Owns: jobs, groups, episodes, the admission bound, repairs. Promise: pure and replayable; a group
is opened only within the bound and durable before its siblings run; a sibling lost to
infrastructure is repaired by a new attempt, at most `repairs_max` times; results of attempts that
are not the newest are dropped. Does not cover: I/O (driver.py), fates (the bank).
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import ClassVar

import msgspec

from muster.types import EpisodeKey, Fate
from services.router import events as e
from services.router.admission import open_groups_max
from services.router.episode import Episode, Phase, mix
from services.router.fleet import Fleet
from services.router.jobs import Group, Job, JobProgress, JobState, Sibling, group_id
from services.router.policy import Placement
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
        self._recovered = False

    def handle(self, event: e.RouterEvent, now: float) -> Commands:
        """Apply one event and answer what is to be done."""
        commands = self._apply(event, now)
        if self._recovered:
            commands += self._open_groups()
            commands += self._launch(now)
        return commands

    def _apply(self, event: e.RouterEvent, now: float) -> Commands:
        match event:
            case e.Tick():
                return self._tick(now)
            case e.JobSubmitted() | e.JobCancelled():
                return self._on_job(event)
            case e.GroupRestored() | e.RecoveryEnded() | e.GroupRecorded() | e.FateRecorded():
                return self._on_group(event)
            case e.VersionPublished() | e.BatchTrained():
                return self._on_policy(event)
            case e.ReplicasListed() | e.HostsListed():
                return self._on_fleet(event)
            case e.EpisodeRecorded():
                return self._on_episode_recorded(event)
            case _:
                return self._on_episode(event, now)

    # -- jobs and groups ---------------------------------------------------------------

    def _on_job(self, event: e.JobSubmitted | e.JobCancelled) -> Commands:
        if isinstance(event, e.JobSubmitted):
            self._jobs.setdefault(event.job.id, Job(event.job))
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
            episode = self._episodes.pop(self._key(group, number).id, None)
            if episode is not None:
                sibling.running = False
                commands += episode.cancel(self._fleet)
        self._waiting = deque(w for w in self._waiting if w[0] != group.id)
        return commands

    def _on_group(
        self, event: e.GroupRestored | e.RecoveryEnded | e.GroupRecorded | e.FateRecorded
    ) -> Commands:
        match event:
            case e.GroupRestored():
                self._restore(event)
            case e.RecoveryEnded():
                self._recovered = True
                self._fates_early.clear()
                for job in self._jobs.values():
                    # Openings are written at once, so a kill may lose one and keep its successor.
                    restored = self._restored[job.spec.id]
                    job.lost = [n for n in range(job.opened) if n not in restored]
                self._restored.clear()
            case e.GroupRecorded():
                group = self._groups.get(event.group)
                if group is not None and not group.recorded:
                    group.recorded = True
                    self._enqueue(group)
            case e.FateRecorded():
                return self._on_fate(event)
        return []

    def _restore(self, event: e.GroupRestored) -> None:
        job = self._jobs[event.job]
        siblings = [Sibling(s.attempt, s.label) for s in event.siblings]
        group = Group(event.group, event.job, event.index, job.task_of(event.index), siblings, True)
        self._groups[group.id] = group
        job.opened = max(job.opened, event.index + 1)
        self._restored[event.job].add(event.index)
        job.complete += group.complete
        for told in event.siblings:
            if told.label is not None:
                job.finished(told.label, told.turns)
        early = self._fates_early.pop(group.id, None)
        if early is not None:
            self._on_fate(e.FateRecorded(group.id, early))  # its step was counted when it came
        elif not job.cancelled:
            self._enqueue(group)

    def _enqueue(self, group: Group) -> None:
        job = self._jobs[group.job]
        if not job.cancelled:
            self._waiting.extend(
                (group.id, n) for n, s in enumerate(group.siblings) if s.label is None
            )

    def _on_fate(self, event: e.FateRecorded) -> Commands:
        # A fate may be told before the batch it belongs to: its slot must not look free till then.
        self._steps = max(self._steps, event.step)
        group = self._groups.get(event.group)
        if group is None:
            if not self._recovered:
                self._fates_early[event.group] = event.fate
            return []
        group.fate = event.fate
        job = self._jobs[group.job]
        job.trained += event.fate is Fate.TRAINED
        job.filtered += event.fate is Fate.FILTERED
        commands = self._stop_group(group)
        del self._groups[group.id]
        return commands

    def _open_groups(self) -> Commands:
        commands: Commands = []
        for job in self._jobs.values():
            while (
                job.state is JobState.RUNNING and job.unopened and len(self._groups) < self._bound()
            ):
                commands.append(self._open(job))
        return commands

    def _open(self, job: Job) -> e.RouterCommand:
        index = job.next_index()
        task = job.task_of(index)
        siblings = [Sibling() for _ in range(job.spec.group_size)]
        group = Group(group_id(job.spec.id, index), job.spec.id, index, task, siblings)
        self._groups[group.id] = group
        return e.OpenGroup(
            group=group.id,
            job=job.spec.id,
            task=task.name,
            task_digest=task.digest,
            group_size=job.spec.group_size,
            version=self._version,
            sampling=job.spec.sampling,
        )

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
            self._version = max(self._version, event.version)
            self._published_step = max(self._published_step, event.step)
        else:
            self._steps = max(self._steps, event.step)
        return []

    def _on_fleet(self, event: e.ReplicasListed | e.HostsListed) -> Commands:
        if isinstance(event, e.ReplicasListed):
            self._fleet.replicas_are(event.replicas)
        else:
            self._fleet.hosts_are(event.hosts)
        return []

    # -- episodes ----------------------------------------------------------------------

    def _launch(self, now: float) -> Commands:
        commands: Commands = []
        while self._waiting and len(self._episodes) < self.rules.episodes_max:
            group_name, number = self._waiting.popleft()
            group = self._groups.get(group_name)
            if group is None or group.siblings[number].running:
                continue
            job = self._jobs[group.job]
            seed = job.spec.sampling.seed
            key = self._key(group, number)
            sampling = msgspec.structs.replace(
                job.spec.sampling, seed=mix(seed, group.index, number, key.attempt)
            )
            episode = Episode(key, group.task, sampling, self.rules)
            group.siblings[number].running = True
            self._episodes[episode.id] = episode
            commands += episode.start(self._fleet, now)
        return commands

    def _key(self, group: Group, number: int) -> EpisodeKey:
        attempt = group.siblings[number].attempt
        return EpisodeKey(self.rules.run, group.id, number, attempt, self.rules.owner_epoch)

    def _tick(self, now: float) -> Commands:
        commands: Commands = []
        for episode in list(self._episodes.values()):
            commands += episode.on_time(self._fleet, now)
        return commands

    def _on_episode(self, event: e.EpisodeEvent, now: float) -> Commands:
        episode = self._episodes.get(event.episode.id)
        if episode is None or episode.key != event.episode:
            return self._after_the_end(event)
        fleet = self._fleet
        match event:
            case e.BoxAcquired():
                return episode.on_box(event, fleet, now)
            case e.BoxRefused():
                return episode.on_box_refused(event, fleet, now)
            case e.Generated():
                return episode.on_generated(event, fleet)
            case e.GenerateFailed():
                return episode.on_generate_failed(event, fleet, now)
            case e.ContextFull():
                return episode.on_context_full(event, fleet)
            case _:
                return self._on_acted(episode, event, now)

    def _after_the_end(self, event: e.EpisodeEvent) -> Commands:
        """An answer that nobody waits for any more: only a box must not be forgotten."""
        if isinstance(event, e.BoxAcquired | e.BoxRefused):
            self._fleet.box_gone(event.host)
        if isinstance(event, e.BoxAcquired):
            return [e.ReleaseBox(event.episode, event.host, event.box)]
        return []

    def _on_acted(
        self,
        episode: Episode,
        event: e.StepFinished | e.StepFailed | e.TurnRecorded | e.VerdictGiven | e.VerifyFailed,
        now: float,
    ) -> Commands:
        match event:
            case e.StepFinished():
                return episode.on_step(event)
            case e.StepFailed():
                return episode.on_step_failed(event)
            case e.TurnRecorded():
                return episode.on_recorded(event, self._fleet, now)
            case e.VerdictGiven():
                return episode.on_verdict(event)
            case e.VerifyFailed():
                return episode.on_verify_failed(event)

    def _on_episode_recorded(self, event: e.EpisodeRecorded) -> Commands:
        episode = self._episodes.get(event.episode.id)
        if episode is None or episode.key != event.episode or episode.phase is not Phase.FINISH:
            return []
        del self._episodes[episode.id]
        if episode.box:
            self._fleet.box_gone(episode.host)
        self._fleet.session_over(episode.id)
        self._conclude(episode)
        return episode.on_finished()

    def _conclude(self, episode: Episode) -> None:
        """The attempt's label is durable: the sibling is final, or repaired."""
        group = self._groups.get(episode.key.group)
        label = episode.label
        if group is None or label is None:
            return
        job, sibling = self._jobs[group.job], group.siblings[episode.key.sibling]
        sibling.running = False
        job.finished(label, episode.turns_recorded)
        if not label.outcome.valid and sibling.attempt < self.rules.repairs_max:
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

    def progress(self, job_id: str) -> JobProgress | None:
        """What people see of a job; None for an unknown one."""
        job = self._jobs.get(job_id)
        if job is None:
            return None
        mine = {g.id for g in self._groups.values() if g.job == job_id}
        running = sum(episode.key.group in mine for episode in self._episodes.values())
        return JobProgress(
            job=job_id,
            state=job.state,
            groups_total=job.spec.groups,
            groups_opened=job.opened,
            groups_complete=job.complete,
            groups_trained=job.trained,
            groups_filtered=job.filtered,
            episodes_running=running,
            episodes_finished=job.episodes_finished,
            turns=job.turns,
            repairs=job.repairs,
            outcomes=dict(sorted(job.outcomes.items())),
            policy_version=self._version,
            waiting_for=self._waiting_for(job),
        )

    def _waiting_for(self, job: Job) -> str:
        if job.state is not JobState.RUNNING:
            return ""
        if not self._fleet.has_replica:
            return "an inference replica (none is announced)"
        if not self._fleet.has_host:
            return "a sandbox host (none is announced)"
        if self._episodes:
            return ""
        if not job.unopened and 0 < len(self._groups) < self.rules.groups_per_batch:
            return (
                f"more groups: {len(self._groups)} are complete, a batch takes "
                f"{self.rules.groups_per_batch} (submit more, or `muster cancel`)"
            )
        if len(self._groups) >= self._bound():
            return f"the trainer: {len(self._groups)} groups are open, {self._bound()} may be"
        return ""
