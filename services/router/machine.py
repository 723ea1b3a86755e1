"""The router's decisions: which group opens, which sibling runs, what a result leads to.

Owns: the running attempts, the order in which the parts decide. Promise: pure and replayable; a
sibling lost to infrastructure is repaired by a new attempt, at most `repairs_max` times; results of
attempts that are not the newest are dropped; what an event of one turn leads to is found without a
look at all attempts, groups or places that wait. Does not cover: I/O (driver.py), fates (the bank).
"""

from __future__ import annotations

from typing import ClassVar

from muster.types import EpisodeKey, Fate, Waiting
from services.router import events as e
from services.router import explain as explaining
from services.router.episode import Episode, Phase
from services.router.fleet import Fleet
from services.router.groups import Groups
from services.router.jobs import Failed, Group, Job, JobProgress, JobState
from services.router.launching import awaits_host, begin
from services.router.leftovers import unwanted
from services.router.order import Place
from services.router.progress import Reason, of_job, waiting_for
from services.router.rules import RouterRules

Commands = list[e.RouterCommand]

_OF_TURNS = frozenset(
    {
        e.BoxAcquired,
        e.BoxRefused,
        e.Generated,
        e.GenerateFailed,
        e.ContextFull,
        e.IntentRecorded,
        e.StepFinished,
        e.StepFailed,
        e.TurnRecorded,
        e.RestoredRecorded,
        e.VerdictGiven,
        e.VerifyFailed,
    }
)
_SAMPLES_NO_MORE = (Phase.VERIFY, Phase.FINISH)


class RouterMachine:
    """`handle(event, now) -> commands`; `now` in seconds of a steady clock."""

    name: ClassVar[str] = "router"
    rules_type: ClassVar[type] = RouterRules
    event_type: ClassVar[object] = e.RouterEvent
    tick_type: ClassVar[type] = e.Tick

    def __init__(self, rules: RouterRules):
        self.rules = rules
        self._fleet = Fleet(rules)
        self._groups = Groups(rules)
        self._episodes: dict[str, Episode] = {}
        self._recovered, self._resume_by = False, 0.0
        self._found: list[e.BoxesFound] = []  # not looked at yet
        self._watch = explaining.Watch()

    def handle(self, event: e.RouterEvent, now: float) -> Commands:
        """Apply one event and answer what is to be done."""
        if type(event) in _OF_TURNS:
            commands = self._on_episode(event, now)  # type: ignore[arg-type]
            if self._fleet.changed:
                commands += self._settle(now)
            if self._fleet.roomy and self._recovered:
                commands += self._launch(now)
            return commands
        commands = self._apply(event, now)
        if isinstance(event, e.RecoveryEnded):
            self._resume_by = now + self.rules.resume_wait_s
            self._fleet.patient(self._resume_by)
        commands += self._settle(now)
        if self._recovered:
            commands += self._groups.to_open(now)
            commands += self._launch(now)
            commands += self._tidy()
        if type(event) in explaining.PROGRESS:
            self._watch.moved = now
        if isinstance(event, e.Tick):
            self._watch.saw_all(self._episodes, now)
        if isinstance(event, e.EpisodeRecorded):
            self._watch.saw(event.episode.id, None, now)
        return commands

    def _apply(self, event: e.RouterEvent, now: float) -> Commands:
        match event:
            case e.Tick():
                return self._tick(now)
            case e.EpisodeRecorded():
                return self._on_episode_recorded(event, now)
            case e.ReplicaTold() | e.ReplicaSilent() | e.ReplicaProbed():
                lost = self._fleet.heard(event, self._groups.version, now)
                return self._lost(lost, now) + self._fleet.health.due(now)
            case e.ReplicasListed():
                return self._lost(self._fleet.replicas_are(event.replicas, now), now)
            case e.HostsListed():
                self._fleet.hosts.listed(event.hosts)
            case e.BoxesFound():
                self._found.append(event)
            case e.MemoryTold():
                self._groups.memory = event.problem
            case e.FateRecorded():
                return self._fated(event, now)
            case _:
                return self._on_groups(event)
        return []

    def _on_groups(self, event: e.RouterEvent) -> Commands:
        groups = self._groups
        match event:
            case e.GroupRecorded():
                groups.recorded(event)
            case e.VersionPublished():
                groups.published(event)
                self._fleet.published(groups.version)
            case e.BatchTrained():
                groups.trained(event.step)
            case e.JobSubmitted():
                groups.submitted(event.job)
            case e.JobCancelled():
                return [c for g in groups.cancelled(event.job) for c in self._stop(g)]
            case e.GroupRestored():
                return self._stop(groups.restored(event))
            case e.JobTotals():
                groups.retired(event)
            case e.RecoveryEnded():
                self._recovered = True
                groups.recovered()
        return []

    def _fated(self, event: e.FateRecorded, now: float) -> Commands:
        """A group has its fate. One that was not filtered had ended: what became of its attempts
        is durable, though the bank may have been quicker to tell than Redis's answer to us."""
        commands: Commands = []
        group = self._groups.open.get(event.group)
        if group is not None and event.fate is not Fate.FILTERED:
            for number in range(len(group.siblings)):
                episode = self._episodes.get(self._key(group, number).id)
                if episode is not None:
                    commands += self._on_episode_recorded(e.EpisodeRecorded(episode.key), now)
        return commands + self._stop(self._groups.fated(event))

    def _stop(self, group: Group | None) -> Commands:
        """End whatever still runs of a group."""
        if group is None:
            return []
        commands: Commands = []
        for number, sibling in enumerate(group.siblings):
            key = self._key(group, number)
            episode = self._episodes.pop(key.id, None)
            if episode is not None:
                sibling.running = False
                self._groups.jobs[group.job].turns += episode.turns_recorded
                commands += episode.cancel(self._fleet)
            elif sibling.resume is not None:  # a former router's, not gone on with yet
                left, sibling.resume = sibling.resume, None
                commands += [e.ReleaseBox(key, left.host, left.box), e.DropConversation(key)]
        self._groups.order.drop(group.id)
        return commands

    def _tidy(self) -> Commands:
        """Give back what a former router left and nobody goes on in; after all was told."""
        if not self._found:
            return []
        found, self._found = self._found, []
        epoch, open_ = self.rules.owner_epoch, self._groups.open
        return [c for one in found for c in unwanted(one, open_, self._episodes, epoch)]

    # -- launching ---------------------------------------------------------------------

    def _launch(self, now: float) -> Commands:
        commands: Commands = []
        order = self._groups.order

        def skip(place: Place) -> bool:
            """Its launch is not due: its job pauses, or its box's host may yet be listed."""
            if self._groups.waits(place, now):
                return True
            sibling = self._groups.open[place[0]].siblings[place[1]]
            return now < self._resume_by and awaits_host(sibling, self._fleet)

        while order and len(self._episodes) < self.rules.episodes_max:
            if not order.resuming and not self._fleet.may_launch(now):
                break
            place = self._groups.next(skip)
            if place is None:
                break
            begun = self._begin(place, now)
            if begun is None:
                break
            commands += begun
        return commands

    def _begin(self, place: Place, now: float) -> Commands | None:
        """Launch this sibling; None when there is no room for it."""
        group = self._groups.open[place[0]]
        key, job = self._key(group, place[1]), self._groups.jobs[group.job]
        if group.siblings[place[1]].resume is None:
            # What a former router left has its place, also while its box's host is waited for.
            if len(self._episodes) + self._groups.order.resuming >= self.rules.episodes_max:
                return None
            if not self._fleet.launch(key.id, group.id, group.prompt[0], now):
                return None
        self._groups.order.launched(place)
        episode, asked = begin(key, group, job, self.rules, self._fleet, now)
        self._episodes[episode.id] = episode
        return self._after(episode, asked)

    def _key(self, group: Group, number: int) -> EpisodeKey:
        attempt = group.siblings[number].attempt
        return EpisodeKey(self.rules.run, group.id, number, attempt, self.rules.owner_epoch)

    # -- episodes ----------------------------------------------------------------------

    def _settle(self, now: float) -> Commands:
        """Let on whoever was held for KV and has room now."""
        commands: Commands = []
        while self._fleet.changed:
            for id_ in self._fleet.settle(now):
                episode = self._episodes[id_]
                commands += self._after(episode, episode.go_on(self._fleet, now))
        return commands

    def _lost(self, replicas: tuple[str, ...], now: float) -> Commands:
        """Ask elsewhere for what ran on them; the dearest first."""
        if not replicas:
            return []
        hit = [x for x in self._episodes.values() if x.replica in replicas]
        hit.sort(key=lambda x: (-x.account.context, x.id))
        commands: Commands = []
        for episode in hit:
            commands += self._after(episode, episode.replica_lost(self._fleet, now))
        return commands

    def _tick(self, now: float) -> Commands:
        commands = self._lost(self._fleet.lost(now), now)
        commands += self._fleet.time(now)
        for episode in list(self._episodes.values()):
            asked = episode.on_time(self._fleet, now)
            if asked:
                commands += self._after(episode, asked)
        busy = any(job.state is JobState.RUNNING for job in self._groups.jobs.values())
        if busy and self._watch.stalled(now, self.rules.stall_s):
            # Relative times: a machine knows no wall clock.
            lines = explaining.of_run(self._picture(now, now))
            commands.append(e.TellStall(tuple(lines)))
        return commands

    def _on_episode(self, event: e.EpisodeEvent, now: float) -> Commands:
        id_ = event.episode.id
        episode = self._episodes.get(id_)
        if type(event) in explaining.PROGRESS:
            self._watch.moved = now
        if episode is None or episode.key != event.episode:
            return self._after_the_end(event)
        replays = episode.replays
        commands = episode.on(event, self._fleet, now)
        self._watch.saw(id_, episode, now)
        if episode.replays != replays:
            group = self._groups.open.get(episode.key.group)
            if group is not None:
                self._groups.jobs[group.job].repairs += episode.replays - replays
        return self._after(episode, commands)

    def _after(self, episode: Episode, commands: Commands) -> Commands:
        """Its KV is free once it samples no more; what waits for a tool may outlive it."""
        if episode.phase in _SAMPLES_NO_MORE:
            for id_ in self._fleet.samples_no_more(episode.id):
                other = self._episodes[id_]
                commands.append(e.Touch(other.key, other.replica))
        return commands

    def _after_the_end(self, event: e.EpisodeEvent) -> Commands:
        """An answer that nobody waits for any more: only a box must not be forgotten."""
        if isinstance(event, e.BoxAcquired | e.BoxRefused):
            self._fleet.hosts.box_gone(event.host)
        if isinstance(event, e.BoxAcquired):
            return [e.ReleaseBox(event.episode, event.host, event.box)]
        return []

    def _on_episode_recorded(self, event: e.EpisodeRecorded, now: float) -> Commands:
        episode = self._episodes.get(event.episode.id)
        if episode is None or episode.key != event.episode or episode.phase is not Phase.FINISH:
            return []
        del self._episodes[episode.id]
        if episode.box:
            self._fleet.hosts.box_gone(episode.host)
        self._fleet.session_over(episode.id)
        if episode.key.group in self._groups.open and episode.label is not None:
            failed = Failed(episode.id, episode.label, now)
            place = (episode.key.group, episode.key.sibling)
            self._groups.ended(place, failed, episode.turns_recorded, now)
        return episode.on_finished()

    # -- questions ---------------------------------------------------------------------

    def job(self, job: str) -> Job | None:
        return self._groups.jobs.get(job)

    def training(self) -> Job | None:
        """The newest job whose groups are for the trainer."""
        jobs = [job for job in self._groups.jobs.values() if not job.spec.evaluates]
        return max(jobs, key=lambda job: job.spec.submitted_unix_s, default=None)

    def replicas(self) -> tuple[str, ...]:
        """Those that are known now."""
        return tuple(sorted(self._fleet.loads.loads))

    def jobs_running(self) -> int:
        return sum(job.state is JobState.RUNNING for job in self._groups.jobs.values())

    def progress(self, job_id: str, now: float) -> JobProgress | None:
        """What people see of a job; None for an unknown one."""
        job = self._groups.jobs.get(job_id)
        if job is None:
            return None
        return of_job(
            job,
            groups=self._groups.open,
            episodes=self._episodes,
            version=self._groups.version,
            waiting=self._waiting_for(job, now),
        )

    def _waiting_for(self, job: Job, now: float) -> Reason:
        return waiting_for(
            job,
            groups=self._groups.open,
            episodes=self._episodes,
            fleet=self._fleet,
            bound=self._groups.bound,
            rules=self.rules,
            paused=self._groups.paused(job, now),
            now=now,
        )

    def explain(self, subject: str, now: float, unix_now: float, logs: str) -> list[Waiting]:
        """What a run, job, group or episode waits for, outermost first; empty when unknown."""
        return explaining.find(subject, self._picture(now, unix_now, logs))

    def _picture(self, now: float, unix_now: float, logs: str = "logs") -> explaining.Picture:
        jobs = self._groups.jobs
        return explaining.Picture(
            run=self.rules.run,
            jobs=jobs,
            groups=self._groups.open,
            episodes=self._episodes,
            reasons={id_: self._waiting_for(job, now) for id_, job in jobs.items()},
            watch=self._watch,
            fleet=self._fleet,
            now=now,
            unix_now=unix_now,
            logs=logs,
        )
