"""The engines that served a run are known after they are gone."""

from __future__ import annotations

import msgspec
from redis.asyncio import Redis

from muster.fingerprint import ServingFingerprint
from muster.served import record, recorded

BFLOAT16 = ServingFingerprint(engine="vllm", dtype="bfloat16", flags=("block_size=32",))
FLOAT32 = msgspec.structs.replace(BFLOAT16, dtype="float32")


async def test_each_kind_of_engine_is_kept_once(valkey: Redis) -> None:
    assert await recorded(valkey, "r") == ()
    for serving in (FLOAT32, BFLOAT16, FLOAT32):
        await record(valkey, "r", serving)

    assert await recorded(valkey, "r") == (BFLOAT16, FLOAT32)
    assert await recorded(valkey, "another") == ()


async def test_rubbish_hides_nothing(valkey: Redis) -> None:
    await record(valkey, "r", BFLOAT16)
    await valkey.sadd("m:{r}:served", b"\xff\xff rubbish")

    assert await recorded(valkey, "r") == (BFLOAT16,)


async def test_a_run_keeps_a_bounded_number_of_them(valkey: Redis) -> None:
    for number in range(70):
        await record(valkey, "r", ServingFingerprint(engine=f"e{number}"))
    await record(valkey, "r", ServingFingerprint(engine="e0"))

    assert len(await recorded(valkey, "r")) == 64
