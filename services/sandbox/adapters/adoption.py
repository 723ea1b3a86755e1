"""Takes over the boxes that a former service of this instance left.

Promise: the newest box of an attempt goes on under its last key, if its note can be read and all
its steps have their answers or run still; every other one ends. Nothing that is found can keep the
host from starting. Does not cover: finding them (the backend), ending those that nobody uses
(pool.py).
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
from services.sandbox.notes import Note
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
    read = {survivor.box: notes.read(survivor) for survivor in found}
    newest = notes.newest_of_each((n, note) for n, note in read.items() if isinstance(note, Note))
    for survivor in found:
        note = read[survivor.box]
        if isinstance(note, Note) and survivor.box not in newest:
            note = "its attempt has a newer box"
        why = note if isinstance(note, str) else _take_over(orders, known, survivor, note)
        if why:
            _log.info("box %s of a former service ends: %s", survivor.box, why)
            await orders.end_backend(survivor.box)
            orders.counts.failures["adopt"] += 1 if survivor.note else 0
        else:
            orders.counts.adopted += 1
            _log.info("box %s of a former service goes on", survivor.box)
    try:
        await orders.backend.claim(orders.templates.layers.names)
    except BoxFailure as failure:  # they go with the boxes on them, and are made anew
        _log.warning("snapshots of a former service are not gone on with: %s", failure)


def _take_over(orders: Orders, known: KnownTasks, survivor: Survivor, note: Note) -> str:
    """Why not, or nothing."""
    try:
        archive = notes.unpacked(survivor.shared)
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
    box.forked_from, box.forked_at, box.since = note.forked_from, note.newest, note.since
    box.noted_epoch = note.key.owner_epoch
    box.touched = ledger.newest > note.newest or survivor.sealed
    if survivor.sealed:
        ledger.closed = "its files are sealed for verification"
    name = survivor.box
    box.acquired = Acquired(name, note.start_s, task.workdir, Made(note.made))
    ask = orders.expect(note.key, box)
    ask.name = name
    ask.answer.set_result(box.acquired)
    orders.boxes[name] = box
    _stand(orders, name, note)
    orders.feed(events.Adopted(name, note.key))
    if survivor.running is not None:
        running = work.step(orders, name, box, partial(orders.backend.rejoin, name))
        box.step = orders.work(name, running, f"step-{name}")
    return ""


def _stand(orders: Orders, name: str, note: Note) -> None:
    """The snapshots that it stands on are known again."""
    layers = orders.templates.layers
    for layer in reversed(note.layers):
        if layers.get(layer.name) is None:
            layers.add(layer, monotonic())
        if layer.content:
            orders.feed(events.Known(layer.content))
    for layer in note.layers[:1]:
        layers.use(name, layer.name, monotonic())
