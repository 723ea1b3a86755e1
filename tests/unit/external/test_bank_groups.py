"""How many groups a batch has is the run's to say, not the settings of the trainer's machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis.asyncio import Redis

from muster.bank import AsyncBankClient
from muster.bank_calls import GROUPS_PER_BATCH, groups_announced
from muster.errors import InvalidInput
from muster.registry import Registry

RUN = "groups"


async def test_a_bank_says_it(valkey: Redis) -> None:
    registry = Registry(valkey, RUN)
    async with registry.announce("readybank", "bank-9", "h:1", {GROUPS_PER_BATCH: "7"}):
        assert await groups_announced(registry) == 7
        async with registry.announce("readybank", "bank-10", "h:1", {}):
            assert await groups_announced(registry) == 0


async def test_more_than_the_run_has_are_refused_whatever_this_machine_is_set_to(
    valkey: Redis, valkey_socket: Path
) -> None:
    registry = Registry(valkey, RUN)
    async with registry.announce("readybank", "bank-1", "h:1", {GROUPS_PER_BATCH: "2"}):
        with pytest.raises(InvalidInput, match="opens no more groups") as caught:
            async with AsyncBankClient(redis_url=f"unix://{valkey_socket}", run=RUN, groups=3):
                pass
    assert "ask for 2 or fewer" in caught.value.way_out


async def test_a_bank_that_does_not_say_it_needs_a_number_and_nobody_is_fenced(
    valkey: Redis, valkey_socket: Path
) -> None:
    before = await valkey.keys("*epoch*")
    async with Registry(valkey, RUN).announce("readybank", "bank-1", "h:1"):
        with pytest.raises(InvalidInput, match="does not say how many groups") as caught:
            async with AsyncBankClient(redis_url=f"unix://{valkey_socket}", run=RUN):
                pass
    assert caught.value.field == "groups"
    assert await valkey.keys("*epoch*") == before
