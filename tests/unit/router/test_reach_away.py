"""A host that is away may come back with its boxes: what is repeated, and what is blamed."""

from __future__ import annotations

import pytest

from muster.errors import InvalidInput, MusterError, NotFound, Unavailable
from services.router.adapters import reach
from services.router.adapters.reach import DiedInFlight, begun, best_effort, keyed, loss_of
from services.router.events import Loss
from tests.unit.router.test_reach import (
    LATE,
    LEFT,
    NOBODY,
    REFUSED,
    SOCKET,
    STOPS,
    UNKNOWN_BOX,
    Calls,
)

AWAY_S = 20.0


class Time:
    """Passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    """Of the module under test alone."""
    time = Time()
    monkeypatch.setattr(reach, "monotonic", time.monotonic)
    monkeypatch.setattr(reach, "asyncio", time)
    return time


class Always(Calls):
    """Fails first as told, then for ever with the last one."""

    async def __call__(self) -> str:
        raise self.errors.pop(0) if len(self.errors) > 1 else self.errors[0]


@pytest.mark.parametrize("first", [SOCKET, LATE, NOBODY, REFUSED, LEFT], ids=str)
async def test_a_step_is_asked_for_again_where_its_host_came_back(first: MusterError) -> None:
    assert await keyed(Calls(first, *[REFUSED] * 10), "Exec", AWAY_S) == "kept"


async def test_a_host_may_go_away_again_under_the_same_step() -> None:
    gone = [SOCKET, *[REFUSED] * 10]
    assert await keyed(Calls(*gone, *gone, *gone), "Exec", AWAY_S) == "kept"


async def test_the_time_of_a_host_begins_when_it_went_away(time: Time) -> None:
    gone = [SOCKET, *[REFUSED] * 15]
    await keyed(Calls(*gone, *gone), "Exec", AWAY_S)
    assert time.now > AWAY_S


async def test_a_host_that_does_not_come_back_is_waited_for_so_long_and_no_longer(
    time: Time,
) -> None:
    with pytest.raises(DiedInFlight):
        await keyed(Always(SOCKET, REFUSED), "Exec", AWAY_S)
    assert AWAY_S <= time.now < AWAY_S + 2


async def test_a_host_that_dies_at_every_try_is_given_up_at_last() -> None:
    with pytest.raises(DiedInFlight):
        await keyed(Calls(*[SOCKET, REFUSED] * 50), "Exec", AWAY_S)


async def test_a_command_that_took_only_the_service_with_it_is_not_blamed() -> None:
    assert await keyed(Calls(SOCKET, REFUSED, REFUSED, SOCKET, REFUSED), "Exec", AWAY_S) == "kept"


async def test_a_box_that_went_with_its_service_is_blamed_on_the_command() -> None:
    with pytest.raises(DiedInFlight):
        await keyed(Calls(SOCKET, REFUSED, UNKNOWN_BOX), "Exec", AWAY_S)


@pytest.mark.parametrize("first", [NOBODY, REFUSED, LEFT], ids=str)
async def test_a_box_that_was_gone_before_the_command_is_not(first: MusterError) -> None:
    with pytest.raises(NotFound) as caught:
        await keyed(Calls(first, UNKNOWN_BOX), "Exec", AWAY_S)
    assert loss_of(caught.value) is Loss.BOX_GONE


@pytest.mark.parametrize("first", [NOBODY, REFUSED, LEFT], ids=str)
@pytest.mark.parametrize("last", [UNKNOWN_BOX, REFUSED], ids=str)
async def test_a_host_that_was_away_first_and_then_died_again_is_not_blamed(
    first: MusterError, last: MusterError
) -> None:
    """Its box may have gone the first time, and nobody heard so: the command never ran there."""
    with pytest.raises(MusterError) as caught:
        await keyed(Always(first, SOCKET, REFUSED, last), "Exec", AWAY_S)
    assert loss_of(caught.value) is Loss.BOX_GONE


async def test_a_host_that_was_told_to_stop_is_believed_at_once(time: Time) -> None:
    with pytest.raises(Unavailable) as caught:
        await keyed(Always(STOPS), "Exec", AWAY_S)
    assert (loss_of(caught.value), time.now) == (Loss.BOX_GONE, 0.0)


@pytest.mark.parametrize("word", [UNKNOWN_BOX, InvalidInput("no", field="command")], ids=str)
async def test_what_a_host_says_is_believed_at_once(word: MusterError, time: Time) -> None:
    with pytest.raises(type(word)):
        await keyed(Always(word), "Exec", AWAY_S)
    assert time.now == 0.0


async def test_a_silent_host_is_not_waited_for_as_one_that_is_away() -> None:
    calls = Calls(*[LATE] * 5)
    with pytest.raises(Unavailable):
        await keyed(calls, "Exec", AWAY_S)
    assert len(calls.errors) == 3


@pytest.mark.parametrize("words", ["the connection was closed on this side", "Channel is closed."])
async def test_a_line_to_an_address_that_its_host_has_left_is_not_silence(words: str) -> None:
    left = Unavailable(f"Verify on h0: {words}")
    assert await keyed(Calls(left), "Verify", AWAY_S, 1) == "kept"
    assert await begun(Calls(left), "AcquireBox", AWAY_S) == "kept"


async def test_a_box_that_its_host_could_not_start_is_asked_for_elsewhere() -> None:
    calls = Calls(*[Unavailable("the box did not start: no memory")] * 2)
    with pytest.raises(Unavailable):
        await begun(calls, "AcquireBox", AWAY_S)
    assert len(calls.errors) == 1


async def test_a_verification_is_silent_only_once() -> None:
    calls = Calls(*[LATE] * 5)
    with pytest.raises(Unavailable):
        await keyed(calls, "Verify", AWAY_S, 1)
    assert len(calls.errors) == 4


async def test_a_request_for_a_box_that_broke_is_repeated_at_the_same_host() -> None:
    assert await begun(Calls(SOCKET, *[REFUSED] * 5), "AcquireBox", AWAY_S) == "kept"


@pytest.mark.parametrize("error", [NOBODY, REFUSED, LEFT, LATE, STOPS], ids=str)
async def test_any_other_request_for_a_box_goes_elsewhere_at_once(error: MusterError) -> None:
    calls = Calls(*[error] * 3)
    with pytest.raises(Unavailable):
        await begun(calls, "AcquireBox", AWAY_S)
    assert len(calls.errors) == 2


async def test_a_release_is_repeated_until_its_host_is_back() -> None:
    calls = Calls(SOCKET, *[REFUSED] * 5)
    await best_effort(calls, AWAY_S)
    assert not calls.errors
