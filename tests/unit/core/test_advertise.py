"""What a service announces of where it listens."""

from __future__ import annotations

import pytest

from muster.advertise import advertised, own_host
from muster.config import Config, load_config
from muster.errors import ConfigError


def settings(redis: str = "", host: str = "") -> Config:
    return load_config(None, {"MUSTER_REDIS__URL": redis, "MUSTER_ADVERTISE_HOST": host})


@pytest.mark.parametrize("address", ["10.0.0.5:7400", "127.0.0.1:7400", "unix:/run/x", "[::1]:1"])
def test_an_address_that_was_listened_on_is_announced_as_it_is(address: str) -> None:
    assert advertised(address, settings(host="elsewhere")) == address


@pytest.mark.parametrize("address", ["0.0.0.0:7400", "[::]:7400"])
def test_all_addresses_become_the_configured_host(address: str) -> None:
    assert advertised(address, settings(host="box-1.example")) == "box-1.example:7400"


def test_an_address_of_version_six_gets_its_brackets() -> None:
    assert advertised("[::]:7400", settings(host="fd00::5")) == "[fd00::5]:7400"


@pytest.mark.parametrize("redis", ["", "unix:///run/redis.sock", "redis://127.0.0.1:6379/0"])
def test_with_redis_on_this_machine_it_is_the_loopback(redis: str) -> None:
    assert advertised("0.0.0.0:7400", settings(redis)) == "127.0.0.1:7400"


def test_a_name_that_nobody_knows_is_an_error_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match="advertise_host"):
        own_host(settings("redis://no-such-host.invalid:6379/0"))
