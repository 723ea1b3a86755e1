"""Takes over the boxes that a former service of this instance left.

Promise: a box with a note that can be read, whose steps all have their answers or run still, goes
on under its last key; every other one ends. Nothing that is found can keep the host from starting.
Does not cover: finding them (the backend), ending those that nobody uses (pool.py).
"""

from __future__ import annotations

from functools import partial

from muster import telemetry
from muster.clock import monotonic
from muster.errors import MusterError, Unavailable
from services.sandbox import content, events, notes
from services.sandbox.adapters import work
from services.sandbox.adapters.callers import Acquired, Made, UsedBox
from services.sandbox.adapters.orders import Orders
from services.sandbox.box import BoxFailure, Survivor
from services.sandbox.ledger import Ledger
from services.sandbox.packages import KnownTasks

_log = telemetry.logger("muster.sandbox")


async def adopt(orders: Orders, known: KnownTasks) -> None:
    """Take over what can be gone on with and end the rest. Raises Unavailable when the backend
    cannot tell what there is."""
    try:
        found = await orders.backend.survivors()
    except BoxFailure as failure:
        way_out = "start the service again once its boxes have ended (sandbox.orphan_s)"
        problem = f"the boxes of a former service cannot be told: {failure}"
        raise Unavailable(problem, way_out=way_out) from failure
    for survivor in found:
        why = _take_over(orders, known, survivor)
        if why:
            _log.info("box %s of a former service ends: %s", survivor.box, why)
            await orders.end_backend(survivor.box)
            orders.counts.failures["adopt"] += 1 if survivor.note else 0
        else:
            orders.counts.adopted += 1
            _log.info("box %s of a former service goes on", survivor.box)


def _take_over(orders: Orders, known: KnownTasks, survivor: Survivor) -> str:
    """Why not, or nothing."""
    note = notes.read(survivor)
    if isinstance(note, str):
        return note
    try:
        archive = notes.unpacked(note.archive)
        task, files = known.task(note.task, note.digest, archive)
        setup = content.setup(task, files, note.base, builds=orders.backend.builds)
    except (ValueError, MusterError) as error:
        return f"its task cannot be read: {error}"
    if survivor.sealed and task.verify == "live":
        return "what was to be judged in it has ended"
    kept = orders.config.answers_kept
    ledger = Ledger(orders.config.steps_max, kept, note.newest)
    ledger.restore(survivor.kept, survivor.running, survivor.newest_turn)
    box = UsedBox(task, files, note.limits, setup, ledger)
    box.forked_at, box.noted_epoch = note.newest, note.key.owner_epoch
    box.touched = ledger.newest >= 0 or survivor.sealed
    if survivor.sealed:
        ledger.closed = "its files are sealed for verification"
    box.acquired = Acquired(survivor.box, 0.0, task.workdir, Made.WARM)
    name = survivor.box
    ask = orders.expect(note.key, box)
    ask.name = name
    ask.answer.set_result(box.acquired)
    orders.boxes[name] = box
    for layer in reversed(note.layers):
        if orders.templates.layers.get(layer.name) is None:
            orders.templates.layers.add(layer, monotonic())
        if layer.content:
            orders.feed(events.Known(layer.content))
    for layer in note.layers[:1]:
        orders.templates.layers.use(name, layer.name, monotonic())
    orders.feed(events.Adopted(name, note.key))
    if survivor.running is not None:
        running = work.step(orders, name, box, partial(orders.backend.rejoin, name))
        box.step = orders.spawn(running, f"step-{name}")
    return ""
