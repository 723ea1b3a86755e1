"""Is the server of the streams one that a run may trust?

Pure: facts in, checks out. Owns: the rules beyond those that every service holds a server to
(durability.py, whose words are used). Does not cover: asking the server (doctor_look.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from muster.config import RedisConfig
from muster.doctor import Check, note, ok, problem
from muster.durability import PROMISES, ServerFacts, check_server
from muster.errors import ConfigError
from muster.types import Value

CLOCKS_S = 2.0  # clocks that differ by more than this spoil times that were taken on two machines
_CLIENTS = 8  # processes of a small deployment


class RedisFacts(Value, frozen=True):
    """shown: the address without credentials. error: why it could not be asked.

    clock_ahead_s: the server's clock less this machine's. aof_error: what it says of its last
    write or rewrite, "" when both went well. Bytes; 0 for a maxmemory means all there is.
    """

    shown: str
    error: str = ""
    server: ServerFacts | None = None
    used_bytes: int = 0
    maxmemory_bytes: int = 0
    maxclients: int = 0
    rejected: int = 0
    aof_error: str = ""
    clock_ahead_s: float = 0.0


def redis_checks(facts: RedisFacts | None, config: RedisConfig) -> Iterator[Check]:
    """facts: None when no server is configured, and `muster up` brings its own."""
    if facts is None:
        yield ok("redis.url", "none is named: `muster up` starts its own on this machine")
        return
    if facts.error or facts.server is None:
        yield problem("redis.url", f"{facts.shown}: {facts.error}", _unreached(facts.error))
        return
    yield ok("redis.url", f"{facts.shown} answers, version {facts.server.version}")
    yield from _durability(facts.server, config, facts.shown)
    yield from _memory(facts, config)
    yield from _connections(facts, config)
    if facts.aof_error:
        yield problem(
            "redis.disk",
            f"its last write to disk failed ({facts.aof_error}): it takes no writes, or will not",
            "free space on its disk, see its log, then `redis-cli BGREWRITEAOF`",
        )
    yield clock("redis.clock", "the server's clock", facts.clock_ahead_s)


def clock(name: str, whose: str, ahead_s: float) -> Check:
    """Whether a clock agrees with another, which is named by what was looked at."""
    if abs(ahead_s) <= CLOCKS_S:
        return ok(name, f"{whose} agrees within {abs(ahead_s):.1f} s")
    way = "ahead" if ahead_s > 0 else "behind"
    return problem(
        name,
        f"{whose} is {abs(ahead_s):.0f} s {way}: times in reports mix both",
        "let a time service set both clocks (systemctl enable --now systemd-timesyncd, or chrony)",
    )


def _unreached(error: str) -> str:
    if "NOAUTH" in error or "AUTH" in error.upper().split():
        return "write the password into redis.url: redis://:PASSWORD@HOST:PORT/0"
    if "WRONGPASS" in error:
        return "correct user and password in redis.url"
    return (
        "start it, correct redis.url, or let port and address through (bind, protected-mode, "
        "firewall)"
    )


def _durability(server: ServerFacts, config: RedisConfig, shown: str) -> Iterator[Check]:
    try:
        warnings = check_server(server, config, shown)
    except ConfigError as error:
        yield problem("redis.durability", error.problem, error.way_out)
        return
    for line in warnings:
        yield note("redis.durability", line, "see docs/adr/0008-what-redis-promises.md")
    if not warnings:
        yield ok("redis.durability", f"{server.policy}: {PROMISES[server.policy]}")


def _memory(facts: RedisFacts, config: RedisConfig) -> Iterator[Check]:
    marks = [config.high_water_bytes] if config.high_water_bytes else []
    if facts.maxmemory_bytes:
        marks.append(int(config.high_water * facts.maxmemory_bytes))
    used = f"{facts.used_bytes / 2**20:.0f} MiB in use"
    if not marks:
        yield note(
            "redis.memory",
            f"{used}, and nothing bounds it: a long run fills the machine",
            "set `maxmemory` there, or redis.high_water_bytes, from which on nothing is launched",
        )
        return
    mark = min(marks)
    if facts.used_bytes >= mark:
        yield problem(
            "redis.memory",
            f"{used}, at or above the mark of {mark / 2**20:.0f} MiB: nothing is launched",
            "raise its maxmemory (redis-cli CONFIG SET maxmemory …) or redis.high_water_bytes, or "
            "let the trainer acknowledge what is there",
        )
        return
    yield ok("redis.memory", f"{used} of {mark / 2**20:.0f} MiB before launches pause")


def _connections(facts: RedisFacts, config: RedisConfig) -> Iterator[Check]:
    wanted = _CLIENTS * config.connections_max
    if facts.maxclients and facts.maxclients < wanted:
        yield problem(
            "redis.connections",
            f"it takes {facts.maxclients} connections; {_CLIENTS} processes may open "
            f"{config.connections_max} each (redis.connections_max)",
            f"raise its maxclients to {wanted} or more, and its limit of open files with it",
        )
    elif facts.rejected:
        yield note(
            "redis.connections",
            f"it has turned {facts.rejected} connections away since it started",
            "raise its maxclients",
        )
    else:
        yield ok("redis.connections", f"up to {facts.maxclients or 'any number of'}")
