"""Who is started, with which surroundings."""

from __future__ import annotations

from pathlib import Path

from muster.config import Config, RedisConfig
from muster.supervise.plan import environment, plan, redis_url

RUNTIME = Path("/tmp/muster-x")


def test_without_a_server_configured_an_embedded_one_comes_first() -> None:
    services = plan(Config(), RUNTIME)
    assert [service.name for service in services] == [
        "redis", "sandbox", "inference", "readybank", "router", "trainer",
    ]  # fmt: skip
    assert all("redis" in service.rule.after for service in services[1:])
    assert redis_url(Config(), RUNTIME) == "unix:///tmp/muster-x/valkey.sock"


def test_the_embedded_server_keeps_an_append_only_file() -> None:
    command = plan(Config(), RUNTIME)[0].command
    assert command[command.index("--appendonly") + 1] == "yes"
    assert command[command.index("--port") + 1] == "0"


def test_a_configured_server_is_used_and_none_is_started() -> None:
    config = Config(redis=RedisConfig(url="redis://there:6379"))
    assert [service.name for service in plan(config, RUNTIME, ("router",))] == ["router"]
    assert redis_url(config, RUNTIME) == "redis://there:6379"


def test_the_router_stops_before_what_its_episodes_need() -> None:
    rules = {service.name: service.rule for service in plan(Config(), RUNTIME)}
    assert rules["router"].outlives == ()
    assert all(rules[name].outlives == ("router",) for name in ("sandbox", "inference"))


def test_settings_reach_services_through_the_file_alone() -> None:
    base = {"PATH": "/bin", "MUSTER_RUN": "x", "MUSTER_TEST_HOOK": "1", "TMPDIR": "/elsewhere"}
    made = environment(base, RUNTIME)
    assert "MUSTER_RUN" not in made
    assert made["MUSTER_TEST_HOOK"] == "1"
    assert made["TMPDIR"] == str(RUNTIME)
