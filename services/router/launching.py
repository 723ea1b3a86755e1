"""How a sibling's attempt begins: anew, or where a former router's records end.

Owns: the making of an episode, its seed. Promise: pure; an attempt has the same seed under every
router. Does not cover: which sibling is next (machine.py).
"""

from __future__ import annotations

import msgspec

from muster.types import EpisodeKey, group_id
from services.router import events as e
from services.router.attempt import Given
from services.router.ceiling import InfraCeiling
from services.router.episode import Episode
from services.router.fleet import Fleet
from services.router.jobs import Failed, Group, Job, Sibling
from services.router.rules import RouterRules
from services.router.sampling import mix


def ceiling_of(job: e.JobSpec, rules: RouterRules) -> InfraCeiling:
    """Measured over as many attempts as a batch has siblings."""
    share = job.policy.infra_ceiling
    return InfraCeiling(
        rules.infra_ceiling if share is None else share,
        job.group_size * rules.groups_per_batch,
        rules.infra_pause_s,
    )


def open_group(job: Job, version: int) -> tuple[Group, e.OpenGroup]:
    """The next group of a job, and the command that makes it durable; only while `unopened`."""
    index, spec = job.next_index(), job.spec
    task = job.task_of(index)
    siblings = [Sibling() for _ in range(spec.group_size)]
    group = Group(group_id(spec.id, index), spec.id, index, task, siblings)
    group.evaluates = spec.evaluates
    return group, e.OpenGroup(
        group=group.id,
        job=spec.id,
        task=task.name,
        task_digest=task.digest,
        group_size=spec.group_size,
        version=version,
        sampling=spec.sampling,
        policy=spec.policy,
        purpose=spec.purpose,
    )


def restored_siblings(event: e.GroupRestored) -> list[Sibling]:
    """The siblings of a group that a former router opened, and what failed in them last."""
    found = []
    for number, told in enumerate(event.siblings):
        sibling = Sibling(told.attempt, told.label, resume=told.resume, started=told.started)
        labels = [
            (told.attempt - len(told.earlier) + n, e.label) for n, e in enumerate(told.earlier)
        ]
        labels += [(told.attempt, told.label)] if told.label is not None else []
        if labels and not labels[-1][1].outcome.valid:
            attempt, label = labels[-1]
            sibling.failed = Failed(f"{event.group}.{number}.{attempt}", label)
        found.append(sibling)
    return found


def awaits_host(sibling: Sibling, fleet: Fleet) -> bool:
    """True when its living box would be taken for lost: its host is not listed, and may be yet."""
    record = sibling.resume
    return record is not None and bool(record.box) and record.host not in fleet.hosts


def begin(
    key: EpisodeKey, group: Group, job: Job, rules: RouterRules, fleet: Fleet, now: float
) -> tuple[Episode, list[e.RouterCommand]]:
    """The episode of `key`, and what it asks for first; the sibling runs from now on."""
    sibling = group.siblings[key.sibling]
    seed = mix(job.spec.sampling.seed, group.index, key.sibling, key.attempt)
    episode = Episode(
        Given(
            key,
            group.task,
            msgspec.structs.replace(job.spec.sampling, seed=seed),
            rules,
            replays_max=job.spec.policy.repairs(rules.repairs_max),
            fresh=sibling.started,
        )
    )
    tokens, marks = group.prompt
    # What a former router's turns left in a cache, its home knows; the index starts anew.
    episode.opens_with(tokens, marks if sibling.resume is None else ())
    record, sibling.resume, sibling.started = sibling.resume, None, False
    sibling.running = True
    if record is not None:
        return episode, episode.resume(record, fleet, now)
    return episode, episode.start(fleet, now)
