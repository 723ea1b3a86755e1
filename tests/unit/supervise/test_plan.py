"""Who is started, with which surroundings."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from muster.config import Config, RedisConfig, load_config
from muster.supervise.plan import environment, plan, redis_url

RUNTIME = Path("/tmp/muster-x")


def test_without_a_server_configured_an_embedded_one_comes_first() -> None:
    services = plan(Config(), RUNTIME)
    assert [service.name for service in services] == [
        "redis", "sandbox", "inference", "readybank", "router", "trainer",
    ]  # fmt: skip
    assert all("redis" in service.rule.after for service in services[1:])
    assert redis_url(Config(), RUNTIME) == "unix:///tmp/muster-x/valkey.sock"


def test_a_service_is_waited_for_as_long_as_it_allows_itself() -> None:
    config = load_config(None, {"MUSTER_INFERENCE__START_TIMEOUT_S": "1200"})
    waits = {service.name: service.rule.ready_s for service in plan(config, RUNTIME)}
    assert (waits["inference"], waits["trainer"], waits["router"]) == (1200.0, 300.0, 60.0)


def test_the_embedded_server_keeps_an_append_only_file() -> None:
    command = plan(Config(), RUNTIME)[0].command
    assert command[command.index("--appendonly") + 1] == "yes"
    assert command[command.index("--port") + 1] == "0"


@pytest.mark.parametrize("policy", ["always", "everysec", "no"])
def test_the_embedded_server_runs_with_the_policy_and_bound_that_were_asked_for(
    policy: Literal["always", "everysec", "no"],
) -> None:
    config = Config(redis=RedisConfig(appendfsync=policy, maxmemory_bytes=1 << 20))
    command = plan(config, RUNTIME)[0].command
    settings = dict(zip(command[1::2], command[2::2], strict=True))
    assert settings["--appendfsync"] == policy
    assert (settings["--maxmemory"], settings["--maxmemory-policy"]) == ("1048576", "noeviction")


def test_a_standby_is_the_same_service_under_another_name() -> None:
    services = {service.name: service for service in plan(Config(standbys=True), RUNTIME)}
    assert [*services][-2:] == ["readybank-2", "router-2"]
    first, second = services["router"], services["router-2"]
    assert (second.command, second.health, second.kind) == (first.command, first.health, "router")
    assert second.rule.after == ("redis", "router")


def test_without_what_it_doubles_there_is_no_standby() -> None:
    services = plan(Config(standbys=True), RUNTIME, ("sandbox",))
    assert [service.name for service in services] == ["redis", "sandbox"]


def test_a_configured_server_is_used_and_none_is_started() -> None:
    config = Config(redis=RedisConfig(url="redis://there:6379"))
    assert [service.name for service in plan(config, RUNTIME, ("router",))] == ["router"]
    assert redis_url(config, RUNTIME) == "redis://there:6379"


def test_the_router_stops_before_what_its_episodes_need() -> None:
    rules = {service.name: service.rule for service in plan(Config(), RUNTIME)}
    assert rules["router"].outlives == ()
    for name in ("sandbox", "inference", "readybank"):
        assert rules[name].outlives == ("router", "router-2")


def test_settings_reach_services_through_the_file_alone() -> None:
    base = {"PATH": "/bin", "MUSTER_RUN": "x", "MUSTER_TEST_HOOK": "1", "TMPDIR": "/elsewhere"}
    made = environment(base, RUNTIME)
    assert "MUSTER_RUN" not in made
    assert made["MUSTER_TEST_HOOK"] == "1"
    assert made["TMPDIR"] == str(RUNTIME)


def test_several_replicas_have_a_name_and_an_id_each() -> None:
    services = plan(Config(replicas=2), RUNTIME)
    found = [service for service in services if service.kind == "inference"]
    assert [service.name for service in found] == ["inference-1", "inference-2"]
    assert [service.command[-2:] for service in found] == [
        ("--replica", "inference-1"),
        ("--replica", "inference-2"),
    ]
    assert [service.id for service in found] == ["inference-1", "inference-2"]


def test_one_replica_keeps_its_id_over_restarts() -> None:
    [service] = [s for s in plan(Config(), RUNTIME) if s.kind == "inference"]
    assert (service.name, service.id) == ("inference", "inference-1")
