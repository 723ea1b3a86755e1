"""Leaves with each box what a successor of this service has to know of it.

Owns: nothing. Promise: a note that cannot be kept is counted, and costs the box no more than that
it ends with this service. Does not cover: what a note says (notes.py), reading it (adoption.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster import telemetry
from muster.types import EpisodeKey
from services.sandbox.adapters.callers import Made, UsedBox
from services.sandbox.notes import Note, packed, without_session, write

if TYPE_CHECKING:
    from services.sandbox.adapters.orders import Orders

_log = telemetry.logger("muster.sandbox")


async def note(
    orders: Orders, key: EpisodeKey, name: str, box: UsedBox, made: Made, start_s: float
) -> None:
    """Note a box in use under its owner."""
    layers = orders.templates.layers
    found = Note(
        key,
        box.task.name,
        box.task.digest,
        box.limits,
        box.setup.base,
        tuple(without_session(layer) for layer in layers.chain(layers.used_by(name))),
        box.forked_at,
        box.forked_from,
        made.value,
        start_s,
        box.since,
    )
    box.noted_epoch = key.owner_epoch
    try:
        await orders.backend.note(name, write(found), packed(box.task.archive))
    except Exception as failure:  # noqa: BLE001 - one box must not end the host
        orders.counts.failures["note"] += 1
        _log.warning("box %s has no note of now: %r", name, failure)


def renote(orders: Orders, key: EpisodeKey, name: str, box: UsedBox) -> None:
    """Another owner goes on in a box: its note follows, in its own time. Until then a successor
    takes it over under the former owner, whom this one then replaces there too."""
    box.noted_epoch = key.owner_epoch
    got = box.acquired
    made, start_s = (got.made, got.start_s) if got else (Made.COLD, 0.0)
    orders.spawn(note(orders, key, name, box, made, start_s), f"note-{name}")
