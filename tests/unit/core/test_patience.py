"""What is away is waited for, as long as the patience lasts and no longer."""

from __future__ import annotations

import asyncio
import logging

import pytest

from muster.errors import Refused, Unavailable
from muster.patience import patiently

AWAY = Unavailable("connection lost", field="redis.url", value="redis://a")


class Away:
    """Fails so often, then answers."""

    def __init__(self, *errors: Exception):
        self._errors, self.calls = list(errors), 0

    async def __call__(self) -> str:
        self.calls += 1
        if self._errors:
            raise self._errors.pop(0)
        return "here"


async def test_a_call_is_repeated_until_it_is_answered() -> None:
    call = Away(AWAY, AWAY)
    assert await patiently("Redis", call, patience_s=60.0, first_s=0.001) == "here"
    assert call.calls == 3


async def test_only_what_is_away_is_waited_for() -> None:
    call = Away(Refused("no"))
    with pytest.raises(Refused):
        await patiently("Redis", call, patience_s=60.0, first_s=0.001)
    assert call.calls == 1


async def test_nobody_waits_past_the_patience() -> None:
    call = Away(AWAY, AWAY)
    with pytest.raises(Unavailable, match=r"Redis has been away .*connection lost") as failed:
        await patiently("Redis", call, patience_s=0.5, first_s=1.0, field="x.patience_s")
    assert (failed.value.field, failed.value.value, call.calls) == ("x.patience_s", "0.5", 1)
    assert failed.value.way_out == "start it again"


async def test_without_a_setting_the_place_that_is_away_is_named() -> None:
    with pytest.raises(Unavailable) as failed:
        await patiently("Redis", Away(AWAY), patience_s=0.5, first_s=1.0)
    assert (failed.value.field, failed.value.value) == ("redis.url", "redis://a")


async def test_a_call_that_was_answered_for_long_begins_the_patience_anew() -> None:
    call = Away(*[AWAY] * 4)
    told = await patiently("it", call, patience_s=0.03, first_s=0.02, anew_s=-1.0)
    assert (told, call.calls) == ("here", 5)


async def test_a_try_that_lasts_before_it_fails_does_not_begin_the_patience_anew() -> None:
    """A disk that is full says so when most is written."""
    tries = 0

    async def full() -> str:
        nonlocal tries
        tries += 1
        await asyncio.sleep(0.02)
        raise AWAY

    with pytest.raises(Unavailable, match="has been away"):
        await patiently("the disk", full, patience_s=0.1, first_s=0.01, most_s=0.01)
    assert 2 <= tries <= 10


async def test_the_first_try_may_take_longer_than_the_patience() -> None:
    call = Away(AWAY)

    async def slow() -> str:
        await asyncio.sleep(0.05)
        return await call()

    assert await patiently("the disk", slow, patience_s=0.04, first_s=0.001) == "here"


@pytest.mark.parametrize("errors", [[AWAY, AWAY], [AWAY, Refused("no")]])
async def test_the_log_tells_what_is_awaited_and_when_that_is_over(
    caplog: pytest.LogCaptureFixture, errors: list[Exception]
) -> None:
    with caplog.at_level(logging.WARNING, "patience"):
        try:
            await patiently("Redis", Away(*errors), patience_s=60.0, first_s=0.001)
        except Refused:
            pass
    told = [(vars(r).get("awaited"), vars(r).get("over")) for r in caplog.records]
    back = errors[-1] is AWAY
    assert told == [("Redis", None)] * errors.count(AWAY) + [("Redis", back)]
    assert len({vars(r).get("wait") for r in caplog.records}) == 1
