"""One try at rebuilding a lost box: recorded commands run again in a new one, compared.

Owns: the place in the row of commands, the comparison. Promise: pure; a box counts as rebuilt only
when every recorded step was seen again as it was (muster.replay). Does not cover: getting the box,
how often it is tried (episode.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from muster.replay import RecordedStep, difference
from muster.types import EpisodeKey
from services.router import events as e


def recorded(turns: Sequence[e.TurnSeen]) -> tuple[RecordedStep, ...]:
    """The steps among finished turns, in order."""
    return tuple(
        RecordedStep(t.turn, t.command, t.exit_code, t.limit, t.output, t.timeout_s)
        for t in turns
        if t.command
    )


class Rebuild:
    """Of one lost box. `host` and `box`: the new one, empty until it is there."""

    def __init__(self, steps: tuple[RecordedStep, ...], lost_host: str, lost_box: str, reason: str):
        self._steps, self._at = steps, 0
        self.lost_host, self.lost_box, self.reason = lost_host, lost_box, reason
        self.start_unix_s = self.end_unix_s = 0.0

    @property
    def step(self) -> RecordedStep | None:
        """What runs now; None when all have run."""
        return self._steps[self._at] if self._at < len(self._steps) else None

    @property
    def ran(self) -> int:
        """The turn that ran last in the new box; -1 before the first."""
        return self._steps[self._at - 1].turn if self._at else -1

    def saw(self, event: e.StepFinished) -> str:
        """One step ran again; what was different, empty when nothing."""
        step = self._steps[self._at]
        self._at += 1
        self.end_unix_s = event.end_unix_s
        if event.box_broken:
            return f"turn {step.turn}: the box broke, which it had not"
        again = RecordedStep(
            step.turn, step.command, event.exit_code, event.limit, event.output, step.timeout_s
        )
        found = difference(step, again)
        return f"turn {step.turn}: {found}" if found else ""

    def record(self, key: EpisodeKey, repair: int, host: str, box: str) -> e.RecordRestored:
        """That the new box stands for the lost one."""
        return e.RecordRestored(
            episode=key,
            repair=repair,
            lost_host=self.lost_host,
            lost_box=self.lost_box,
            host=host,
            box=box,
            turns_replayed=len(self._steps),
            reason=self.reason[:500],
            start_unix_s=self.start_unix_s,
            end_unix_s=self.end_unix_s,
        )
