"""Which kinds of engines served a run, kept with it in Redis.

Owns: the key `m:{run}:served`, a set of serialized ServingFingerprints. Promise: what a replica
recorded before it served anything stays for as long as the run's streams do, so that an evaluation
can tell whether its engine is that of the training rollouts; equal engines are one entry. Does not
cover: which replica served which turn (the turns' own records), the comparison (fingerprint.py).
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError
from redis.asyncio import Redis

from muster import telemetry
from muster.fingerprint import ServingFingerprint, fingerprint_from_pb, fingerprint_to_pb
from muster.redis_link import RESERVE, reaching_redis
from muster.v1 import inference_pb2 as pb

_log = telemetry.logger("muster.served")
_KINDS_MAX = 64  # of engines in one run; more would be a mistake, and are not kept

# KEYS: the set. ARGV: what to add, how many there may be.
_ADD = (
    RESERVE
    + """
if redis.call("SISMEMBER", KEYS[1], ARGV[1]) == 1 then return 1 end
if redis.call("SCARD", KEYS[1]) >= tonumber(ARGV[2]) then return 0 end
redis.call("SADD", KEYS[1], ARGV[1])
return 1
"""
)


async def record(client: Redis, run: str, serving: ServingFingerprint) -> None:
    """An engine like this serves the run. Raises Unavailable when Redis does not answer."""
    data = fingerprint_to_pb(serving).SerializeToString(deterministic=True)
    with reaching_redis():
        kept = await client.register_script(_ADD)(keys=[_key(run)], args=[data, _KINDS_MAX])
    if not kept:
        _log.warning("run %s was served by %d kinds of engines; no more are kept", run, _KINDS_MAX)


async def recorded(client: Redis, run: str) -> tuple[ServingFingerprint, ...]:
    """Every kind of engine that ever served the run, sorted; raises as `record` does."""
    members: Any = set()
    with reaching_redis():
        members = await client.smembers(_key(run))
    found = []
    for data in members:
        try:
            found.append(fingerprint_from_pb(pb.ServingFingerprint.FromString(data)))
        except DecodeError as error:
            _log.error("an engine that served run %s is left out: %s", run, error)
    return tuple(sorted(found))


def _key(run: str) -> str:
    return f"m:{{{run}}}:served"
