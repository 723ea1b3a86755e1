"""Only a call that lasts while all is well begins the trainer's patience anew."""

from __future__ import annotations

import asyncio

import pytest

from muster.errors import Unavailable
from services.trainer.adapters import retry

TRIES = 20


class Late:
    """Fails after a while, so often; then it answers."""

    def __init__(self) -> None:
        self.tries = 0

    async def __call__(self) -> str:
        self.tries += 1
        await asyncio.sleep(0.02)
        if self.tries < TRIES:
            raise Unavailable("no space left")
        return "here"


@pytest.mark.parametrize("long", [False, True])
async def test_a_disk_that_is_full_late_is_given_up_and_a_lease_is_not(
    monkeypatch: pytest.MonkeyPatch, long: bool
) -> None:
    monkeypatch.setattr(retry, "_ANSWERED_S", 0.01)
    call = Late()
    if long:
        assert await retry.retried("it", call, retry_s=0.1, first_s=0.001, long=True) == "here"
        return
    with pytest.raises(Unavailable, match="has been away"):
        await retry.retried("it", call, retry_s=0.1, first_s=0.001)
    assert 1 < call.tries < TRIES


async def test_a_lease_whose_tries_fail_soon_is_given_up() -> None:
    """A store that does not answer takes its time to say so, and less than an answered lease."""
    call = Late()
    with pytest.raises(Unavailable, match="has been away"):
        await retry.retried("it", call, retry_s=0.1, first_s=0.001, long=True)
