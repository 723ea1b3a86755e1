"""What a verifier left, read strictly."""

from __future__ import annotations

import pytest

from muster.types import VerdictStatus
from services.sandbox.box import Evidence, Judgement
from services.sandbox.verdict import read

REWARDED, INVALID = VerdictStatus.REWARDED, VerdictStatus.INVALID


def text(content: bytes) -> Judgement:
    return Judgement(Evidence(), {"reward.txt": content})


def json(content: bytes) -> Judgement:
    return Judgement(Evidence(), {"reward.json": content})


@pytest.mark.parametrize(
    ("judgement", "reward"),
    [
        (text(b"1"), 1.0),
        (text(b" 0.25\n"), 0.25),
        (text(b"5e-1"), 0.5),
        (json(b'{"reward": 0.5, "speed": 9}'), 0.5),
        (json(b'{"score": 1}'), 1.0),
        (Judgement(Evidence(exit_code=1), {"reward.txt": b"0"}), 0.0),
        (Judgement(Evidence(), {"reward.json": b'{"reward": 1}', "reward.txt": b"0"}), 1.0),
    ],
)
def test_a_finite_number_in_range_is_a_reward(judgement: Judgement, reward: float) -> None:
    found = read(judgement)
    assert (found.status, found.reward) == (REWARDED, reward)


@pytest.mark.parametrize(
    "judgement",
    [
        text(b"nan"),
        text(b"inf"),
        text(b"-0.1"),
        text(b"1.5"),
        text(b"1e999"),
        text(b"1_0"),
        text(b""),
        text(b"0x1"),
        text(b"\xff\xfe"),
        text(b"1 1"),
        json(b'{"reward": NaN}'),
        json(b'{"reward": true}'),
        json(b'{"reward": 1, "sub": {}}'),
        json(b'{"reward": 1, "sub": [1]}'),
        json(b'{"reward": "1"}'),
        json(b'{"a": 1, "b": 1}'),
        json(b'{"reward": 1' + b"0" * 400 + b"}"),
        json(b"[" * 60000),
        json(b"1"),
        json(b"{}"),
        Judgement(Evidence(), {}, {"reward.json": "not a plain file"}),
        # A broken reward.json is not healed by a reward.txt beside it.
        Judgement(Evidence(), {"reward.txt": b"1"}, {"reward.json": "over 65536 bytes"}),
        Judgement(Evidence(exit_code=1), {}, {"reward.txt": "absent"}),
    ],
)
def test_anything_else_is_invalid_and_says_what_was_found(judgement: Judgement) -> None:
    found = read(judgement)
    assert (found.status, found.reward) == (INVALID, 0.0)
    assert found.detail


def test_a_verdict_written_before_the_time_limit_does_not_count() -> None:
    late = Judgement(Evidence(timed_out=True, wall_s=3.0), {"reward.txt": b"1"})
    assert read(late).status is VerdictStatus.TIMEOUT


@pytest.mark.parametrize(
    "judgement",
    [
        Judgement(Evidence(exit_code=127)),
        Judgement(Evidence(exit_code=126)),
        Judgement(Evidence(broken="PID 1 is gone")),
    ],
)
def test_a_verifier_that_could_not_run_is_a_set_up_failure(judgement: Judgement) -> None:
    assert read(judgement).status is VerdictStatus.SETUP_FAILED
