"""The section of the hosts, against what the router of the same file counts on."""

from __future__ import annotations

import pytest

from muster.config import load_config
from muster.errors import ConfigError
from services.sandbox.config import section


def test_the_built_in_settings_agree() -> None:
    assert section(load_config(None, {})).adopt_s > 0


@pytest.mark.parametrize(
    ("variable", "value", "field"),
    [
        ("MUSTER_SANDBOX__ADOPT_S", "300", "sandbox.adopt_s"),
        ("MUSTER_ROUTER__HOLD_MAX_S", "900", "sandbox.adopt_s"),
        ("MUSTER_SANDBOX__IDLE_S", "300", "sandbox.idle_s"),
        ("MUSTER_SANDBOX__ORPHAN_S", "10", "sandbox.orphan_s"),
        ("MUSTER_ROUTER__COMMAND_BYTES_MAX", "70000", "sandbox.command_bytes_max"),
        ("MUSTER_SANDBOX__STEPS_MAX", "100", "sandbox.steps_max"),
    ],
)
def test_a_host_that_would_throw_away_or_refuse_what_the_router_counts_on_is_named(
    variable: str, value: str, field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        section(load_config(None, {variable: value}))
    assert caught.value.field == field
