"""What people see of a job while it runs.

Owns: the counts and the one line that says why nothing more is launched. Promise: pure; the line
is empty exactly while something runs or may be launched. Does not cover: details (explain.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from services.router.episode import Episode
from services.router.fleet import Fleet
from services.router.jobs import Group, Job, JobProgress, JobState
from services.router.rules import RouterRules


def waiting_for(
    job: Job,
    *,
    groups: Mapping[str, Group],
    episodes: Mapping[str, Episode],
    fleet: Fleet,
    bound: int,
    rules: RouterRules,
    paused: str,
) -> str:
    """Why nothing more of this job is launched; empty while it is, or while it runs.

    `paused`: what stops launches altogether (the infrastructure ceiling, Redis memory).
    """
    if job.state is not JobState.RUNNING:
        return ""
    if paused:
        return paused
    if not fleet.has_replica:
        return "an inference replica (none is announced)"
    if not fleet.has_host:
        return "a sandbox host (none is announced)"
    if episodes:
        return ""
    if not job.unopened and 0 < len(groups) < rules.groups_per_batch:
        return (
            f"more groups: {len(groups)} are complete, a batch takes "
            f"{rules.groups_per_batch} (submit more, or `muster cancel`)"
        )
    if len(groups) >= bound:
        return f"the trainer: {len(groups)} groups are open, no more may be before its next step"
    return ""


def of_job(
    job: Job,
    *,
    groups: Mapping[str, Group],
    episodes: Mapping[str, Episode],
    version: int,
    waiting: str,
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
        waiting_for=waiting,
    )
