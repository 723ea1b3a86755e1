"""How full the Redis server is, measured against the high-water mark.

Owns: one reading. Promise: one INFO call, no write. Does not cover: what is paused above the mark
(the router launches nothing new; what runs goes on, so that groups complete and are retired).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redis.asyncio import Redis

from muster.config import RedisConfig
from muster.streams import reaching_redis


async def memory_share(client: Redis, config: RedisConfig) -> float:
    """Memory in use as a share of the high-water mark: from 1.0 on, launch nothing new.

    0.0 when there is no mark: the server has no maxmemory and redis.high_water_bytes is 0.
    Raises Unavailable when Redis does not answer.
    """
    info: Mapping[str, Any] = {}
    with reaching_redis():
        info = await client.info("memory")
    return share(info, config)


async def memory_problem(client: Redis, config: RedisConfig) -> str:
    """Why nothing new should be launched, for people; "" below the mark. Raises Unavailable."""
    full = await memory_share(client, config)
    if full < 1.0:
        return ""
    return (
        f"Redis uses {full:.0%} of its high-water mark: launches wait until trained groups are "
        "retired; give it more maxmemory, or raise redis.high_water or redis.high_water_bytes"
    )


def share(info: Mapping[str, Any], config: RedisConfig) -> float:
    """The same from the answer to INFO memory."""
    # The server counts so too before it says OOM: its buffers for the file and replicas are apart.
    used = int(info["used_memory"]) - int(info.get("mem_not_counted_for_evict", 0))
    marks = (int(info.get("maxmemory", 0)) * config.high_water, float(config.high_water_bytes))
    nearest = min((mark for mark in marks if mark > 0), default=0.0)
    return used / nearest if nearest else 0.0
