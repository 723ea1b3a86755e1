"""Jobs and groups: what was asked for, what is open, what may still be opened.

Owns: jobs, groups, the bound on open groups, what waits for a launch, pauses. Promise: pure; a
group is opened only within the bound, and launched only once it is durable, those of earlier jobs
first and each job's in turn; a restart brings back every group, and the indexes that were lost.
Does not cover: attempts (machine.py, episode.py).
"""

from __future__ import annotations

from collections import defaultdict

from muster.types import Fate
from services.router import events as e
from services.router.admission import open_groups_max
from services.router.ceiling import InfraCeiling
from services.router.jobs import Failed, Group, Job, JobState
from services.router.launching import ceiling_of, open_group, restored_siblings
from services.router.order import Place, Skip
from services.router.placements import Mark
from services.router.progress import Reason
from services.router.rules import RouterRules
from services.router.shares import Launches


class Groups:
    """Of one run."""

    def __init__(self, rules: RouterRules):
        self._rules = rules
        self.jobs: dict[str, Job] = {}
        self.open: dict[str, Group] = {}
        self.evaluating: dict[str, Group] = {}  # of the open ones
        self.order = Launches(rules.interleave_groups, rules.evaluation_share, rules.episodes_max)
        self.version = 0
        self.memory = ""  # why Redis's memory stops launches, empty when it does not
        self._published_step = self._steps = 0
        self._recovering = True
        self._restored: defaultdict[str, set[int]] = defaultdict(set)  # job → indexes, at recovery
        self._fates_early: dict[str, Fate] = {}  # told before their group, at recovery
        self._ceilings: dict[str, InfraCeiling] = {}

    # -- jobs --------------------------------------------------------------------------

    def submitted(self, job: e.JobSpec) -> None:
        self.jobs.setdefault(job.id, Job(job, len(self.jobs)))
        self._ceilings.setdefault(job.id, ceiling_of(job, self._rules))

    def cancelled(self, id_: str) -> list[Group]:
        """Stop a job for good; answers its open groups."""
        job = self.jobs.get(id_)
        if job is None or job.state is not JobState.RUNNING:
            return []
        job.cancelled = True
        return [group for group in self.open.values() if group.job == id_]

    def published(self, event: e.VersionPublished) -> None:
        # Numbers only grow, steps go back with a trainer that rolled back.
        if event.version >= self.version:
            self.version, self._published_step = event.version, event.step

    def trained(self, step: int) -> None:
        self._steps = max(self._steps, step)

    # -- groups ------------------------------------------------------------------------

    def recorded(self, event: e.GroupRecorded) -> None:
        """An opened group is durable: its siblings may run."""
        group = self.open.get(event.group)
        if group is not None and not group.recorded:
            group.recorded = True
            group.prompt = self._prompt(event)
            self._enqueue(group)

    def _prompt(self, told: e.GroupRecorded | e.GroupRestored) -> tuple[int, tuple[Mark, ...]]:
        block = self._rules.prefix_block_tokens
        marks = tuple((hash_, (n + 1) * block) for n, hash_ in enumerate(told.prompt_blocks))
        return told.prompt_tokens, marks

    def restored(self, event: e.GroupRestored) -> Group | None:
        """A former router opened it; answers it when it must be stopped."""
        job = self.jobs[event.job]
        siblings = restored_siblings(event)
        group = Group(event.group, event.job, event.index, job.task_of(event.index), siblings, True)
        group.prompt, group.evaluates = self._prompt(event), job.spec.evaluates
        job.failed = group.failed or job.failed
        self._opens(group)
        job.opened = max(job.opened, event.index + 1)
        self._restored[event.job].add(event.index)
        job.complete += group.complete
        for told in event.siblings:
            job.restored(told)
        early = self._fates_early.pop(group.id, None)
        if early is not None:
            return self.fated(e.FateRecorded(group.id, early))  # its step was counted before
        if job.cancelled:
            return group
        self._enqueue(group)
        return None

    def retired(self, event: e.JobTotals) -> None:
        """What a job's groups that are no longer kept add up to."""
        self.jobs[event.job].retired(event)
        self._restored[event.job].update(event.indexes_retired)

    def recovered(self) -> None:
        """Everything durable was told."""
        self._fates_early.clear()
        self._recovering = False
        for job in self.jobs.values():
            # Openings are written at once, so a kill may lose one and keep its successor.
            restored = self._restored[job.spec.id]
            job.lost = [n for n in range(job.opened) if n not in restored]
        self._restored.clear()

    def _enqueue(self, group: Group) -> None:
        if self.jobs[group.job].cancelled:
            return
        order = self.order.of(group.id, evaluates=group.evaluates)
        # Records are answered in any order, and a restart tells groups in the order of records.
        rank = (self.jobs[group.job].number, group.index)
        for number, sibling in enumerate(group.siblings):
            place = (group.id, number)
            if sibling.resume is not None:
                order.resume(place)
            elif sibling.label is None and sibling.attempt:
                order.repair(place)
            elif sibling.label is None:
                order.fresh(place, rank)

    def _opens(self, group: Group) -> None:
        self.open[group.id] = group
        if group.evaluates:
            self.evaluating[group.id] = group

    def fated(self, event: e.FateRecorded) -> Group | None:
        """A group is done with; answers it when something of it may still run."""
        # A fate may be told before the batch it belongs to: its slot must not look free till then.
        self._steps = max(self._steps, event.step)
        group = self.open.pop(event.group, None)
        self.evaluating.pop(event.group, None)
        if group is None:
            if self._recovering:
                self._fates_early[event.group] = event.fate
            return None
        self.jobs[group.job].took(event.fate)
        return group

    def ended(self, place: Place, failed: Failed, turns: int, now: float) -> None:
        """An attempt has its label, durably: its sibling is final, or repaired."""
        group, label = self.open[place[0]], failed.label
        job, sibling = self.jobs[group.job], group.siblings[place[1]]
        sibling.running = False
        job.finished(label, turns)
        job.failed = sibling.failed = None if label.outcome.valid else failed
        self._ceilings[group.job].ended(label, now)
        repairs_max = job.spec.policy.repairs(self._rules.repairs_max)
        if not label.outcome.valid and sibling.attempt < repairs_max:
            sibling.attempt += 1
            job.repairs += 1
            self.order.of(group.id, evaluates=group.evaluates).repair(place)
            return
        sibling.label = label
        job.complete += group.complete

    # -- what may begin ----------------------------------------------------------------

    def paused(self, job: Job, now: float) -> Reason:
        """What stops the launches of a job; without a text when nothing does."""
        why = self._ceilings[job.spec.id].why(now)
        return Reason(why) if why else Reason(self.memory, "redis")

    def waits(self, place: Place, now: float) -> bool:
        """Whether infrastructure stops the launches of this sibling's job."""
        return self._ceilings[self.open[place[0]].job].paused(now)

    def next(self, skip: Skip) -> Place | None:
        """The sibling to launch; None when there is none."""
        if not self.evaluating:
            return self.order.next(skip, evaluating=0, training_runs=False)
        siblings = [s for group in self.evaluating.values() for s in group.siblings]
        jobs = self.jobs.values()
        trains = any(j.state is JobState.RUNNING and not j.spec.evaluates for j in jobs)
        running = sum(s.running for s in siblings)
        return self.order.next(skip, evaluating=running, training_runs=trains)

    def to_open(self, now: float) -> list[e.RouterCommand]:
        """Open what the bound allows; each is launched once it is durable."""
        commands: list[e.RouterCommand] = []
        for job in self.jobs.values():
            if job.state is not JobState.RUNNING or not job.unopened or self.paused(job, now).text:
                continue
            while job.unopened and self._may_open(job):
                group, command = open_group(job, self.version)
                self._opens(group)
                commands.append(command)
        return commands

    def _may_open(self, job: Job) -> bool:
        """Evaluation opens as many as can run, and takes nothing of the bound."""
        if job.spec.evaluates:
            open_ = sum(len(group.siblings) for group in self.evaluating.values())
            return open_ < self._rules.episodes_max
        return len(self.open) - len(self.evaluating) < self.bound

    @property
    def bound(self) -> int:
        """Most groups that may be open for the trainer."""
        return open_groups_max(
            lag_max=self._rules.lag_max,
            published_step=self._published_step,
            steps_trained=self._steps,
            groups_per_batch=self._rules.groups_per_batch,
        )
