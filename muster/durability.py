"""What a Redis server promises about finished trajectories, and whether that is what was asked for.

Pure. Owns: the promise of each policy, the order of policies, the refusals. Promise: a server that
keeps less than `redis.appendfsync` asks for is refused, unless `redis.allow_volatile` accepts it.
Does not cover: asking the server (redis_link.py).

What is lost of the entries whose append was acknowledged (docs/adr/0008):

| policy | the server is killed | the machine loses power |
|---|---|---|
| always | nothing | nothing |
| everysec | nothing | up to two seconds: one until the next fsync, one while that runs |
| no | nothing | what the kernel had not written yet, half a minute and more |
| no append-only file | all since the last snapshot | all since the last snapshot |
"""

from __future__ import annotations

from collections.abc import Iterator

from muster.config import RedisConfig
from muster.errors import ConfigError
from muster.types import Value

NO_FILE = "no append-only file"
PROMISES = {
    "always": "nothing acknowledged is lost, not even by a power cut",
    "everysec": "a killed server loses nothing, a power cut up to two seconds",
    "no": "a killed server loses nothing, a power cut what the kernel had not written, "
    "half a minute and more",
    NO_FILE: "everything since its last snapshot is lost whenever the server ends",
}
_ORDER = (NO_FILE, "no", "everysec", "always")
_KEEPS = "noeviction"
_VERSION_MIN = 7  # of Redis: flags of scripts, and an append-only file with a manifest


class ServerFacts(Value, frozen=True):
    """What a server says of itself; "" where it would not say."""

    version: str
    replica: bool
    aof: bool
    appendfsync: str = ""
    rewrite_without_fsync: bool = False
    eviction: str = _KEEPS

    @property
    def policy(self) -> str:
        """The policy that holds, "" when the server does not tell."""
        return self.appendfsync if self.aof else NO_FILE


_ACCEPT = "accept it with redis.allow_volatile = true (muster up: --allow-volatile)"


def check_settings(config: RedisConfig) -> None:
    """Raise ConfigError when the settings ask for less than they may."""
    if config.appendfsync == "no" and not config.allow_volatile:
        raise ConfigError(
            f"with this policy {PROMISES['no']}",
            field="redis.appendfsync",
            value=config.appendfsync,
            way_out=f"use everysec or always, or {_ACCEPT}",
        )


def check_server(facts: ServerFacts, config: RedisConfig, shown: str) -> list[str]:
    """Lines of warning about a server at the address `shown`.

    Raises ConfigError when it cannot be used, or keeps less than is asked for.
    """
    for problem, way_out in _unfit(facts):
        raise ConfigError(problem, field="redis.url", value=shown, way_out=way_out)
    warnings = list(_doubts(facts))
    for problem, way_out in _volatile(facts, config.appendfsync):
        if not config.allow_volatile:
            raise ConfigError(
                problem, field="redis.url", value=shown, way_out=f"{way_out}, or {_ACCEPT}"
            )
        warnings.append(f"{problem}; accepted by redis.allow_volatile")
    return warnings


def _unfit(facts: ServerFacts) -> Iterator[tuple[str, str]]:
    major = facts.version.partition(".")[0]
    if major.isdigit() and int(major) < _VERSION_MIN:
        yield (
            f"this Redis is too old: {facts.version}",
            f"use Redis {_VERSION_MIN} or newer, or any Valkey",
        )
    if facts.replica:
        yield "this Redis is a replica: it takes no writes", "name its primary"


def _volatile(facts: ServerFacts, asked: str) -> Iterator[tuple[str, str]]:
    policy = facts.policy
    if policy == NO_FILE:
        yield f"this Redis keeps {NO_FILE}: {PROMISES[NO_FILE]}", "set `appendonly yes` there"
    elif policy and _ORDER.index(policy) < _ORDER.index(asked):
        yield (
            f"this Redis runs with `appendfsync {policy}`: {PROMISES[policy]}; "
            f"redis.appendfsync asks for {asked}: {PROMISES[asked]}",
            f"set `appendfsync {asked}` there",
        )
    if facts.eviction != _KEEPS:
        yield (
            f"this Redis evicts keys when it is full (maxmemory-policy {facts.eviction}), "
            "and each is a lost trajectory",
            f"set `maxmemory-policy {_KEEPS}` there",
        )


def _doubts(facts: ServerFacts) -> Iterator[str]:
    if facts.aof and not facts.appendfsync:
        yield (
            "this Redis does not tell its appendfsync (CONFIG GET is denied): what a power cut "
            f"loses is not known here; with everysec {PROMISES['everysec']}"
        )
    if facts.aof and facts.rewrite_without_fsync:
        yield (
            "this Redis does not fsync while it rewrites its file (no-appendfsync-on-rewrite yes): "
            f"during that, {PROMISES['no']}"
        )
