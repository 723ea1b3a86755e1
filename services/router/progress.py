"""What people see of a job while it runs.

Owns: the counts, and the reason why nothing more is launched and who has to move. Promise: pure;
a pause, and a fleet without a replica or without a fit host, are said while episodes run too; all
else only while none does. Does not cover: details (explain.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from services.router.episode import Episode
from services.router.fleet import Fleet
from services.router.jobs import Group, Job, JobProgress, JobState
from services.router.rules import RouterRules


class Reason(msgspec.Struct, frozen=True):
    """Why nothing more of a job is launched; an empty text while nothing holds it."""

    text: str = ""
    owner: str = "router"  # who has to move


def waiting_for(
    job: Job,
    *,
    groups: Mapping[str, Group],
    episodes: Mapping[str, Episode],
    fleet: Fleet,
    bound: int,
    rules: RouterRules,
    paused: Reason,
) -> Reason:
    """Why nothing more of this job is launched.

    `paused`: what stops launches altogether (the infrastructure ceiling, Redis memory).
    """
    if job.state is not JobState.RUNNING:
        return Reason()
    if paused.text:
        return paused
    if not fleet.has_replica:
        return Reason("an inference replica (none is announced)", "inference")
    if not fleet.has_host:
        return Reason("a sandbox host (none is announced)", "sandbox")
    if not fleet.has_builder and any(task.builds for task in job.spec.tasks):
        return Reason("a sandbox host that builds images (none is announced)", "sandbox")
    if episodes:
        return Reason()
    if not job.unopened and 0 < len(groups) < rules.groups_per_batch:
        return Reason(
            f"more groups: {len(groups)} are complete, a batch takes "
            f"{rules.groups_per_batch} (submit more, or `muster cancel`)",
            "client",
        )
    if len(groups) >= bound:
        told = f"the trainer: {len(groups)} groups are open, no more may be before its next step"
        return Reason(told, "trainer")
    return Reason()


def of_job(
    job: Job,
    *,
    groups: Mapping[str, Group],
    episodes: Mapping[str, Episode],
    version: int,
    waiting: Reason,
) -> JobProgress:
    """The counts of a job. `waiting`: see waiting_for()."""
    mine = {g.id for g in groups.values() if g.job == job.spec.id}
    return JobProgress(
        job=job.spec.id,
        state=job.state,
        groups_total=job.spec.groups,
        groups_opened=job.opened,
        groups_complete=job.complete,
        groups_trained=job.trained,
        groups_filtered=job.filtered,
        episodes_running=sum(e.key.group in mine for e in episodes.values()),
        episodes_finished=job.episodes_finished,
        turns=job.turns,
        repairs=job.repairs,
        outcomes=dict(sorted(job.outcomes.items())),
        policy_version=version,
        waiting_for=waiting.text,
    )
