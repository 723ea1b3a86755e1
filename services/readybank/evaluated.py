"""What an evaluation found out about one complete group.

Owns: that summary. Promise: pure; of each sibling the attempt that counts, whatever its outcome, so
that failures of the infrastructure are counted and nobody takes them for the model's. Does not
cover: figures over groups (muster/evaluation.py), when a group is complete (assembly.py).
"""

from __future__ import annotations

from msgspec.structs import replace

from muster.evaluated import EvaluatedGroup, EvaluatedSibling
from services.readybank.assembly import Attempt, GroupAssembly


def evaluated(known: GroupAssembly) -> EvaluatedGroup:
    """Of a complete group."""
    assert known.opened is not None
    return EvaluatedGroup(
        known.group,
        known.opened.job,
        known.opened.task,
        known.opened.sampling,
        known.opened_unix_s,
        known.complete_unix_s,
        tuple(_sibling(number, attempt) for number, attempt in enumerate(known.members())),
    )


def _sibling(number: int, attempt: Attempt) -> EvaluatedSibling:
    assert attempt.label is not None
    turns = attempt.turns.values()
    return EvaluatedSibling(
        number,
        attempt.number,
        replace(attempt.label, detail=""),
        len(turns),
        sum(turn.prompt_tokens for turn in turns),
        sum(turn.sampled_tokens for turn in turns),
        tuple(sorted({span.version for turn in turns for span in turn.spans})),
        tuple(sorted({turn.replica for turn in turns if turn.replica})),
    )
