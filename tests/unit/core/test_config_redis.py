"""Which Redis is good enough for which settings."""

from __future__ import annotations

from typing import Any

import pytest

from muster.config import RedisConfig
from muster.durability import NO_FILE, PROMISES, ServerFacts, check_server, check_settings
from muster.errors import ConfigError
from muster.memory import share


def facts(**changes: Any) -> ServerFacts:
    usual: dict[str, Any] = {
        "version": "7.2.4",
        "replica": False,
        "aof": True,
        "appendfsync": "everysec",
    }
    return ServerFacts(**(usual | changes))


def asking(**settings: Any) -> RedisConfig:
    return RedisConfig(url="redis://h", **settings)


ENOUGH = [
    ("everysec", facts()),
    ("everysec", facts(appendfsync="always")),
    ("always", facts(appendfsync="always")),
    ("everysec", facts(version="8.0.1")),
    ("everysec", facts(version="")),
]


@pytest.mark.parametrize(("asked", "server"), ENOUGH)
def test_a_server_that_keeps_what_is_asked_for_is_used(asked: str, server: ServerFacts) -> None:
    assert check_server(server, asking(appendfsync=asked), "h") == []


TOO_LITTLE = [
    ("everysec", facts(aof=False, appendfsync=""), PROMISES[NO_FILE], "`appendonly yes`"),
    ("everysec", facts(appendfsync="no"), PROMISES["no"], "`appendfsync everysec`"),
    ("always", facts(), PROMISES["everysec"], "`appendfsync always`"),
    ("everysec", facts(eviction="allkeys-lru"), "lost trajectory", "maxmemory-policy noeviction"),
]


@pytest.mark.parametrize(("asked", "server", "promise", "way_out"), TOO_LITTLE)
def test_one_that_keeps_less_names_its_promise_and_may_be_accepted(
    asked: str, server: ServerFacts, promise: str, way_out: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_server(server, asking(appendfsync=asked), "h")
    assert promise in caught.value.problem
    assert way_out in caught.value.way_out
    assert "--allow-volatile" in caught.value.way_out
    [warning] = check_server(server, asking(appendfsync=asked, allow_volatile=True), "h")
    assert promise in warning


NEVER = [(facts(replica=True), "a replica"), (facts(version="6.2.14"), "too old: 6.2.14")]


@pytest.mark.parametrize(("server", "problem"), NEVER)
def test_one_that_cannot_do_is_refused_whatever_is_accepted(
    server: ServerFacts, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_server(server, asking(allow_volatile=True), "h")


def test_a_server_that_does_not_tell_its_policy_is_used_with_a_warning() -> None:
    [warning] = check_server(facts(appendfsync=""), asking(), "h")
    assert "CONFIG GET is denied" in warning


def test_a_hole_during_rewrites_is_told() -> None:
    [warning] = check_server(facts(rewrite_without_fsync=True), asking(), "h")
    assert "no-appendfsync-on-rewrite" in warning


def test_asking_for_less_than_everysec_has_to_be_said_twice() -> None:
    with pytest.raises(ConfigError, match="half a minute"):
        check_settings(RedisConfig(appendfsync="no"))
    check_settings(RedisConfig(appendfsync="no", allow_volatile=True))
    check_settings(RedisConfig(appendfsync="everysec"))


MARKS = [
    ({"maxmemory": 1000}, {}, 0.5),  # 400 of 0.8 * 1000
    ({"maxmemory": 1000}, {"high_water": 0.4}, 1.0),
    ({"maxmemory": 0}, {}, 0.0),
    ({"maxmemory": 0}, {"high_water_bytes": 200}, 2.0),
    ({"maxmemory": 1000}, {"high_water_bytes": 200}, 2.0),
    ({"maxmemory": 1000, "mem_not_counted_for_evict": 200}, {}, 0.25),
    ({}, {}, 0.0),
]


@pytest.mark.parametrize(("info", "settings", "expected"), MARKS)
def test_memory_is_measured_against_the_nearest_mark(
    info: dict[str, int], settings: dict[str, Any], expected: float
) -> None:
    assert share({"used_memory": 400} | info, asking(**settings)) == pytest.approx(expected)
