"""A trainer's epoch.

Owns: taking the next one. Promise: it is above every epoch that Redis counts and above every one
that the checkpoints know of, and the counter is never lowered. A Redis that lost its last second to
a power cut may count from below an epoch that the bank or a replica has already seen: the trainer
would be refused as a former one although it is the only one.
"""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis

from muster.redis_link import RESERVE, reaching_redis

# KEYS: the counter. ARGV: what is known to have been used. A full server lets it in: the trainer's
# records are what lets memory be freed.
_TAKE = (
    RESERVE
    + """
local now = tonumber(redis.call("GET", KEYS[1]) or "0")
local next = math.max(now, tonumber(ARGV[1])) + 1
redis.call("SET", KEYS[1], string.format("%d", next))
return next
"""
)


async def take_epoch(client: Redis, run: str, used: int) -> int:
    """Every former trainer is fenced from now on. Raises Unavailable."""
    take: Any = client.register_script(_TAKE)
    with reaching_redis():
        return int(await take(keys=[f"m:{{{run}}}:epoch:trainer"], args=[used]))
