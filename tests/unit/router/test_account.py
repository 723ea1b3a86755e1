"""What a turn is charged with: the time of the model, never that of Muster."""

from __future__ import annotations

import pytest

from muster.types import EpisodeKey, EpisodeState, FinishReason
from services.router import events as e
from services.router.account import Account


def reply(*, decode_s: float, end: float) -> e.Generated:
    return e.Generated(
        EpisodeKey("run", "job-00000", 0, 0, 1),
        0,
        "DONE",
        FinishReason.STOP,
        10,
        5,
        start_unix_s=100.0,
        queue_s=1.0,
        prefill_s=2.0,
        end_unix_s=end,
        decode_s=decode_s,
    )


@pytest.mark.parametrize(
    ("decode_s", "end", "charged", "held"),
    [
        (4.0, 107.0, 6.0, 0.0),  # nothing but the engine took time
        (4.0, 107.8, 6.8, 0.0),  # the line took a little
        (4.0, 167.0, 6.0, 60.0),  # the router was stopped for a minute
        (-1.0, 167.0, 66.0, 0.0),  # the engine does not tell
        (400.0, 107.0, 6.0, 0.0),  # no longer than the call
    ],
)
def test_a_reply_that_lay_waiting_is_not_charged_to_the_model(
    decode_s: float, end: float, charged: float, held: float
) -> None:
    account = Account()
    account.clock(reply(decode_s=decode_s, end=end), held=False)
    assert account.spent_s == pytest.approx(charged)
    intervals = account.take_intervals()
    waits = [i.end_unix_s - i.start_unix_s for i in intervals if i.state is EpisodeState.HOLD]
    assert sum(waits) == pytest.approx(held)
    assert sum(i.end_unix_s - i.start_unix_s for i in intervals) == pytest.approx(end - 100.0)
    assert account.last_unix_s == end
