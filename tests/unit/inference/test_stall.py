"""An engine that has work and gives nothing is noticed; one that has none is left alone."""

from __future__ import annotations

import pytest

from services.inference.engine import Load
from services.inference.stall import Stall

BUSY, QUEUED, IDLE = Load(running=1), Load(waiting=1), Load()


def silence(*looks: tuple[Load, bool, float]) -> float:
    """After the last of (load, updating, now)."""
    stall, found = Stall(), 0.0
    for load, updating, now in looks:
        found = stall.silent_s(load, updating=updating, now=now)
    return found


@pytest.mark.parametrize("load", [BUSY, QUEUED])
def test_the_silence_of_a_busy_engine_is_counted(load: Load) -> None:
    assert silence((IDLE, False, 0.0), (load, False, 10.0), (load, False, 14.0)) == 14.0


def test_a_token_ends_the_silence() -> None:
    later = Load(running=1, tokens_generated=1)

    assert silence((BUSY, False, 0.0), (later, False, 10.0), (later, False, 12.0)) == 2.0


def test_idle_time_does_not_count() -> None:
    assert silence((BUSY, False, 0.0), (IDLE, False, 50.0), (BUSY, False, 51.0)) == 1.0


def test_the_time_of_an_update_does_not_count() -> None:
    assert silence((BUSY, False, 0.0), (BUSY, True, 50.0), (BUSY, False, 51.0)) == 1.0
