"""What a restarted router makes of the streams: which siblings are final, which go on, and where.

Owns: what is remembered of an attempt while the streams are read, and what follows. Promise: pure;
the newest attempt decides; one without a label goes on after its last finished turn, or with the
command it was about to run; one whose records have a gap does not go on, and one that ended so is
followed by another: nobody could train on it. Does not cover: reading
and decoding (adapters/restore.py), payloads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from muster.types import OutcomeLabel, Value
from services.router.carriers import Ended, IntentSeen, Resume, SiblingRestored, TurnSeen


class AttemptSeen(Value, frozen=True):
    """What the streams hold of one attempt, in their order. `host`, `box`: the newest named."""

    sibling: int
    attempt: int
    turns: tuple[TurnSeen, ...] = ()
    intents: tuple[IntentSeen, ...] = ()
    host: str = ""
    box: str = ""
    replays: int = 0
    finished: bool = False
    whole: bool = True  # every turn that its end counts is there

    def in_box(self, host: str, box: str) -> AttemptSeen:
        return msgspec.structs.replace(self, host=host or self.host, box=box or self.box)

    def intended(self, intent: IntentSeen) -> AttemptSeen:
        return msgspec.structs.replace(self, intents=(*self.intents, intent))

    def turned(self, turn: TurnSeen) -> AttemptSeen:
        """A finished turn; its time limit stands in its intent."""
        limits = [i.timeout_s for i in self.intents if i.turn == turn.turn]
        turn = msgspec.structs.replace(turn, timeout_s=limits[-1] if limits else 0.0)
        return msgspec.structs.replace(self, turns=(*self.turns, turn))

    def restored(self, repair: int) -> AttemptSeen:
        return msgspec.structs.replace(self, replays=max(self.replays, repair))

    def ended(self, turns: int) -> AttemptSeen:
        """Its end, which counts `turns`: written after them, so none comes later."""
        whole = {turn.turn for turn in self.turns} >= set(range(turns))
        return msgspec.structs.replace(self, finished=True, whole=whole)


def restore_siblings(
    group_size: int,
    seen: Iterable[AttemptSeen],
    labels: Mapping[tuple[int, int], OutcomeLabel],
    repairs_max: int,
) -> tuple[SiblingRestored, ...]:
    """State of each sibling, in order. `labels` by (sibling, attempt)."""
    attempts: dict[int, dict[int, AttemptSeen]] = {}
    for one in seen:
        attempts.setdefault(one.sibling, {})[one.attempt] = one
    return tuple(_restore(attempts.get(n, {}), labels, repairs_max) for n in range(group_size))


def _restore(
    attempts: Mapping[int, AttemptSeen],
    labels: Mapping[tuple[int, int], OutcomeLabel],
    repairs_max: int,
) -> SiblingRestored:
    if not attempts:
        return SiblingRestored(0, started=True)
    newest = attempts[max(attempts)]
    ended = {
        number: Ended(label, len(one.turns), one.replays)
        for number, one in sorted(attempts.items())
        if one.finished and (label := labels.get((one.sibling, number))) is not None
    }
    last = ended.pop(newest.attempt, None)
    earlier = tuple(ended.values())
    lost = newest.finished and (last is None or (last.label.outcome.valid and not newest.whole))
    if lost:  # its label cannot be read, or a turn is gone: the bank cannot take it either
        earlier = (*earlier, last) if last else earlier
        return SiblingRestored(newest.attempt + 1, started=True, earlier=earlier)
    if last is None:
        resume = _resume(newest) if newest.turns or newest.intents else None
        return SiblingRestored(
            newest.attempt,
            resume=resume,
            started=resume is None,
            earlier=earlier,
            replays=newest.replays,
        )
    if last.label.outcome.valid or newest.attempt >= repairs_max:
        return SiblingRestored(
            newest.attempt, last.label, last.turns, earlier=earlier, replays=last.replays
        )
    return SiblingRestored(newest.attempt + 1, started=True, earlier=(*earlier, last))


def _resume(seen: AttemptSeen) -> Resume:
    turns = tuple(sorted(seen.turns, key=lambda turn: turn.turn))
    intent = next((i for i in seen.intents if i.turn == len(turns)), None)
    gap = next((n for n, turn in enumerate(turns) if turn.turn != n), None)
    ahead = any(i.turn > len(turns) for i in seen.intents)
    broken = ""
    if gap is not None or ahead:
        broken = f"turn {len(turns) if gap is None else gap} is not in the events stream"
    return Resume(turns, intent, seen.host, seen.box, seen.replays, broken)
