"""How a sibling's attempt begins: anew, or where a former router's records end.

Owns: the making of an episode, its seed. Promise: pure; an attempt has the same seed under every
router. Does not cover: which sibling is next (machine.py).
"""

from __future__ import annotations

import msgspec

from muster.types import EpisodeKey
from services.router import events as e
from services.router.episode import Episode, mix
from services.router.fleet import Fleet
from services.router.jobs import Group, Job
from services.router.rules import RouterRules


def begin(
    key: EpisodeKey, group: Group, job: Job, rules: RouterRules, *, replays_max: int
) -> tuple[Episode, e.Resume | None]:
    """The episode of `key`, and the records that it goes on from; the sibling runs from now on."""
    sibling = group.siblings[key.sibling]
    seed = mix(job.spec.sampling.seed, group.index, key.sibling, key.attempt)
    episode = Episode(
        key,
        group.task,
        msgspec.structs.replace(job.spec.sampling, seed=seed),
        rules,
        fresh=sibling.started,
        replays_max=replays_max,
    )
    record, sibling.resume, sibling.started = sibling.resume, None, False
    sibling.running = True
    return episode, record


def first(
    episode: Episode, record: e.Resume | None, fleet: Fleet, now: float
) -> list[e.RouterCommand]:
    """What is to be done first."""
    if record is not None:
        return episode.resume(record, fleet, now)
    return episode.start(fleet, now)
