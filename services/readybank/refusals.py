"""Refusals of a trainer's calls, for people.

Owns: their texts. Promise: pure; each names a field, its value and the way out. Does not cover:
when (lease.py, returning.py).
"""

from __future__ import annotations

from services.readybank.events import Batch, RefuseCall

RESTORE = (
    "restore the Redis data of this run, register with the batches that the checkpoint keeps, or "
    "start a new run"
)
REGISTER = "call RegisterTrainer with the checkpoint's batches, which bring it back"
_TOGETHER = "restore checkpoints and Redis data that belong together, or start a new run"
_TOLD_MAX = 400


def told(batch: Batch) -> str:
    """Its members for people, cut to a length that fits a message."""
    text = " ".join(f"{m.group}{[*m.attempts]}".replace(" ", "") for m in batch.members)
    return text if len(text) <= _TOLD_MAX else f"{text[:_TOLD_MAX]}…"


def refuse(call: str, problem: str, step: int, way_out: str) -> RefuseCall:
    """Of a step."""
    return RefuseCall(call, problem, "step", str(step), way_out)


def fenced(call: str, epoch: int, newest: int) -> RefuseCall:
    """A newer trainer is in charge."""
    return RefuseCall(
        call,
        "a newer trainer took over",
        "trainer_epoch",
        str(epoch),
        f"stop: epoch {newest} is in charge",
        fenced=True,
    )


def in_two_batches(call: str, batches: list[Batch], group: str) -> RefuseCall:
    """A checkpoint's batches, one of which has the group, and the records here exclude each
    other."""
    batch = [b for b in batches if any(m.group == group for m in b.members)][-1]
    problem = f"group {group} of the checkpoint's step {batch.step} stands in another batch here"
    return RefuseCall(call, problem, "batches", told(batch), _TOGETHER)


def unlike(call: str, known: Batch, brought: Batch) -> RefuseCall:
    """The checkpoint and the record here say different things of one step."""
    problem = f"the record here of step {known.step} says {told(known)}"
    return RefuseCall(call, problem, "batches", told(brought), _TOGETHER)


def lost(call: str, last: int, step: int) -> RefuseCall:
    """The checkpoint has a step of which nothing is known here."""
    problem = (
        f"the checkpoint has step {last}, and the record of step {step} is lost here: its "
        "groups would be trained twice"
    )
    return RefuseCall(call, problem, "last_durable_step", str(last), RESTORE)


def before_mark(call: str, last: int, mark: int) -> RefuseCall:
    """The checkpoint's lineage would need groups that are deleted."""
    problem = (
        f"the trainer told that each of its checkpoints has step {mark}, so the groups up to "
        f"there are deleted; this one has only step {last}"
    )
    way_out = f"restore a checkpoint of step {mark} or later, or start a new run"
    return RefuseCall(call, problem, "last_durable_step", str(last), way_out)
