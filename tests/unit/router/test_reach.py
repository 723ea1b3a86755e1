"""What a failed call says of a box, and what it does not."""

from __future__ import annotations

import pytest

from muster.errors import Exhausted, MusterError, NotFound, Refused, Unavailable
from services.router.adapters.reach import DiedInFlight, keyed, loss_at_verdict, loss_of
from services.router.events import Loss
from services.sandbox.adapters.callers import stops

SOCKET = Unavailable("Exec on h0: UNAVAILABLE: Socket closed")
NOBODY = Unavailable("Exec on h0: UNAVAILABLE: failed to connect to all addresses")
REFUSED = Unavailable(
    "Exec on h0: UNAVAILABLE: failed to connect to all addresses; last error: UNKNOWN: "
    "ipv4:10.0.0.1:7: Failed to connect to remote host: connect: Connection refused (111)"
)
LATE = Unavailable("Exec on h0: DEADLINE_EXCEEDED: Deadline Exceeded")
LEFT = Unavailable("h0 is not there any more", field="address")
STOPS = stops()
UNKNOWN_BOX = NotFound("this host has no such box", field="box", value="b1")
LOST_WITH_STEP = NotFound("the box is lost with the result of its step", field="box")


@pytest.mark.parametrize(
    ("error", "want"),
    [
        (UNKNOWN_BOX, Loss.BOX_GONE),
        (LOST_WITH_STEP, Loss.BOX_KILLED),
        (NotFound("no such task", field="task"), Loss.UNKNOWN),
        (DiedInFlight("gone"), Loss.BOX_KILLED),
        (NOBODY, Loss.BOX_GONE),
        (Refused("turn 3 has begun already", field="turn"), Loss.UNKNOWN),
        (Exhausted("too many steps"), Loss.UNKNOWN),
        (MusterError("INTERNAL"), Loss.UNKNOWN),
    ],
    ids=str,
)
def test_a_failed_step_blames_a_lost_box_only_where_it_is_lost(
    error: MusterError, want: Loss
) -> None:
    assert loss_of(error) is want


@pytest.mark.parametrize(
    ("error", "want"),
    [
        (UNKNOWN_BOX, Loss.BOX_GONE),
        (SOCKET, Loss.BOX_KILLED),
        (Refused("a step of this box is running", field="box"), Loss.UNKNOWN),
    ],
    ids=str,
)
def test_a_failed_verification_says_whether_to_ask_again(error: MusterError, want: Loss) -> None:
    assert loss_at_verdict(error) is want


class Calls:
    """Fails as told, then answers."""

    def __init__(self, *errors: MusterError):
        self.errors = list(errors)

    async def __call__(self) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return "kept"


@pytest.mark.parametrize("first", [SOCKET, NOBODY], ids=str)
async def test_a_call_whose_answer_was_lost_is_repeated_once(first: MusterError) -> None:
    assert await keyed(Calls(first), "Exec") == "kept"


@pytest.mark.parametrize("first", [SOCKET, LATE], ids=str)
async def test_a_process_that_ended_with_the_call_is_told_apart(first: MusterError) -> None:
    with pytest.raises(DiedInFlight):
        await keyed(Calls(first, REFUSED), "Exec")


@pytest.mark.parametrize("second", [SOCKET, NOBODY, LATE, UNKNOWN_BOX], ids=str)
async def test_a_host_that_is_only_out_of_reach_was_not_killed(second: MusterError) -> None:
    with pytest.raises(MusterError) as caught:
        await keyed(Calls(SOCKET, second), "Exec")
    assert loss_of(caught.value) is Loss.BOX_GONE


@pytest.mark.parametrize("first", [NOBODY, REFUSED, LEFT, STOPS], ids=str)
async def test_a_peer_that_was_gone_or_was_stopped_was_not_taken_by_the_command(
    first: MusterError,
) -> None:
    with pytest.raises(Unavailable) as caught:
        await keyed(Calls(first, REFUSED), "Exec")
    assert loss_of(caught.value) is Loss.BOX_GONE
