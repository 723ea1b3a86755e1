"""Groups that a trainer gives back, and what becomes of their batch.

Owns: what may be given back. Promise: pure; what was acknowledged, or is not in the batch, is
refused; a repeat changes nothing and is answered as the first; a batch is given back from
`returns_max` times at most, whatever dies between. Does not cover: who tops it up (composing.py).

A batch has revisions. A return makes the next one: what stays, in one write with the fates of what
went, so no crash can fall between them, and from then on nobody is sent the former composition. It
is topped up when its step is leased next; that is durable before it is sent, as ever. What a
checkpoint has is thus always the newest revision: a trainer that gave groups back never trains on
the batch that it had, and one that comes back is sent what its predecessor would have been.
Batches of steps that were acknowledged once stay as they are, also for a trainer that goes back.
"""

from __future__ import annotations

from msgspec.structs import replace

from muster.types import Fate
from services.readybank.events import (
    AnswerReturned,
    Batch,
    FateRecord,
    GivenBack,
    RefuseCall,
    ReturnAsked,
    WriteReturned,
)
from services.readybank.lease import Leases
from services.readybank.refusals import refuse

REASON = "returned_"


def give_back(
    leases: Leases, event: ReturnAsked
) -> tuple[WriteReturned | None, AnswerReturned | RefuseCall | None]:
    """What to write, or what to answer now; neither for a repeat of what is being written."""
    refused = leases.unknown_trainer(event.call, event.epoch)
    if refused:
        return None, refused
    batch = leases.batch(event.step)
    if batch is None or acknowledged(leases, event.step):
        return None, _not_leased(leases, event)
    members = {member.group for member in batch.members}
    wanted = {given.group: given for given in event.groups}
    strange = sorted(wanted.keys() - members - set(batch.returned))
    if strange:
        problem = f"it is not in the batch of step {event.step}"
        way_out = "give back groups of the batch as it was leased last"
        return None, RefuseCall(event.call, problem, "groups", strange[0], way_out)
    answer = AnswerReturned(event.call, len(wanted))
    fresh = {group: given for group, given in wanted.items() if group in members}
    if not fresh:
        return None, leases.when_returned(event.step, answer)
    refused = _not_now(leases, event, batch)
    if refused:
        return None, refused
    short = replace(
        batch,
        members=tuple(m for m in batch.members if m.group not in fresh),
        revision=batch.revision + 1,
        returned=(*batch.returned, *fresh),
        groups=len(batch.members),
        trainer_epoch=event.epoch,
    )
    leases.give_back(short, answer)
    return WriteReturned(short, tuple(map(_fate, fresh.values()))), None


def acknowledged(leases: Leases, step: int) -> bool:
    """Its groups have, or are getting, the fate of having been trained."""
    return step <= max(leases.mark, leases.last_durable) or leases.ends(step)


def returns_left(leases: Leases, batch: Batch) -> int:
    """How often groups of a leased batch may still be given back."""
    if acknowledged(leases, batch.step):
        return 0
    return max(0, leases.rules.returns_max - batch.revision)


def _fate(given: GivenBack) -> FateRecord:
    reason = f"{REASON}{given.reason}"
    return FateRecord(given.group, Fate.FILTERED, reason=reason, measured_kl=given.measured_kl)


def _not_leased(leases: Leases, event: ReturnAsked) -> RefuseCall:
    if leases.batch(event.step) is None and event.step > leases.mark:
        way_out = "give back groups of a leased batch"
        return refuse(event.call, "no batch of this step was leased", event.step, way_out)
    problem = "this step is acknowledged: its groups have been trained"
    return refuse(event.call, problem, event.step, "train on the batch as it was leased")


def _not_now(leases: Leases, event: ReturnAsked, batch: Batch) -> RefuseCall | None:
    if event.step not in leases.frozen:
        problem = "groups of this step were given back, and it was not leased again"
        return refuse(event.call, problem, event.step, f"lease step {event.step} first")
    if batch.revision >= leases.rules.returns_max:
        problem = f"groups of this step were given back {batch.revision} times"
        way_out = "train on the batch as it was leased, or raise readybank.returns_max"
        return refuse(event.call, problem, event.step, way_out)
    return None
