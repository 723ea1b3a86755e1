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
    now: float,
) -> Reason:
    """Why nothing more of this job is launched.

    `paused`: what stops launches altogether (the infrastructure ceiling, Redis memory).
    """
    if job.state is not JobState.RUNNING:
        return Reason()
    if paused.text:
        return paused
    missing = _peers(job, fleet, now)
    if missing.text:
        return missing
    if episodes:
        return Reason()
    if fleet.proving(now):
        return Reason("the first probes of the fleet's replicas", "inference")
    if why := fleet.why_no_room(now):
        return Reason(f"room in a replica's KV cache ({why})", "inference")
    mine = [group for group in groups.values() if group.evaluates is job.spec.evaluates]
    complete = sum(group.complete for group in mine)
    if job.spec.evaluates:
        told = f"the ready bank: {complete} complete groups have no fate yet"
        return Reason(told, "readybank") if complete else Reason()
    if not job.unopened and 0 < complete == len(mine) < rules.groups_per_batch:
        return Reason(
            f"more groups: {complete} are complete, a batch takes "
            f"{rules.groups_per_batch} (submit more, or `muster cancel`)",
            "client",
        )
    if len(mine) >= bound:
        told = f"the trainer: {len(mine)} groups are open, no more may be before its next step"
        return Reason(told, "trainer")
    return Reason()


def _peers(job: Job, fleet: Fleet, now: float) -> Reason:
    """What is missing of replicas and hosts."""
    if not fleet.has_replica:
        return Reason("an inference replica (none is announced)", "inference")
    if why := fleet.why_none(now):
        return Reason(f"an inference replica that takes turns ({why})", "inference")
    if not fleet.hosts:
        return Reason("a sandbox host (none is announced)", "sandbox")
    if not fleet.hosts.builds and any(task.builds for task in job.spec.tasks):
        return Reason("a sandbox host that builds images (none is announced)", "sandbox")
    return Reason()


def of_job(
    job: Job,
    *,
    groups: Mapping[str, Group],
    episodes: Mapping[str, Episode],
    version: int,
    waiting: Reason,
) -> JobProgress:
    """The counts of a job, turns of running attempts included. `waiting`: see waiting_for()."""
    mine = {g.id for g in groups.values() if g.job == job.spec.id}
    running = [e for e in episodes.values() if e.key.group in mine]
    return JobProgress(
        job=job.spec.id,
        state=job.state,
        groups_total=job.spec.groups,
        groups_opened=job.opened,
        groups_complete=job.complete,
        groups_trained=job.trained,
        groups_filtered=job.filtered,
        episodes_running=len(running),
        episodes_finished=job.episodes_finished,
        turns=job.turns + sum(e.turns_recorded for e in running),
        repairs=job.repairs,
        outcomes=dict(sorted(job.outcomes.items())),
        policy_version=version,
        waiting_for=waiting.text,
        groups_evaluated=job.evaluated,
        purpose=job.spec.purpose,
    )
