"""Boxes that a former router, or a host whose service came back, holds and nobody goes on in.

Owns: which of a host's living boxes are given back. Promise: pure; a box is wanted by the attempt
that its records name it for, and left alone while that attempt asks the same host for one (the host
then uses or ends it itself); all others are ended now instead of when their host forgets them.
Does not cover: what a host ends by itself (sandbox.adopt_s).
"""

from __future__ import annotations

from collections.abc import Mapping

from services.router import events as e
from services.router.episode import Episode
from services.router.jobs import Group


def unwanted(
    found: e.BoxesFound,
    groups: Mapping[str, Group],
    episodes: Mapping[str, Episode],
    owner_epoch: int,
) -> list[e.ReleaseBox]:
    """What to give back of a host's boxes; after every group was restored."""
    return [
        e.ReleaseBox(living.episode, found.host, living.box)
        for living in found.boxes
        if living.former_epoch <= owner_epoch
        and not _wanted(living, found.host, groups.get(living.episode.group), episodes)
    ]


def _wanted(
    living: e.Living, host: str, group: Group | None, episodes: Mapping[str, Episode]
) -> bool:
    number = living.episode.sibling
    if group is None or number >= len(group.siblings):
        return False
    sibling = group.siblings[number]
    if sibling.attempt != living.episode.attempt or sibling.label is not None:
        return False
    if sibling.resume is not None:
        return (sibling.resume.host, sibling.resume.box) == (host, living.box)
    episode = episodes.get(living.episode.id)
    return episode is not None and episode.host == host and episode.box in ("", living.box)
