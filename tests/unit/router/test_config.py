"""What the router's section says reaches its machine."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from muster.config import Config
from services.router.config import RouterConfig, rules
from services.router.costs import Costs
from services.router.rules import RouterRules

_FIXED = {
    "run",
    "owner_epoch",
    "groups_per_batch",  # of the whole run
    "repairs_max",
    "verify_retries_max",  # protocol, not policy
    "retry_after_s",
    "retry_max_s",
    "move_margin",  # published constants of sticky_least_loaded
    "move_ratio",
    "resume_wait_s",
    "probes",
    "limits",
}
_COSTS = Costs.__struct_fields__


def test_every_rule_that_is_no_constant_can_be_configured() -> None:
    missing = set(RouterRules.__struct_fields__) - _FIXED - set(RouterConfig.model_fields)
    assert missing == set()


@pytest.mark.parametrize(
    "name", [*_COSTS, "keepalive_tokens", "launch_fill", "probe_pause_s", "probe_pause_max_s"]
)
def test_a_value_of_its_own_reaches_the_machine(name: str) -> None:
    default = getattr(RouterConfig(), name)
    section = RouterConfig.model_validate(
        {name: default * 1.5 if name != "keepalive_tokens" else 7}
    )
    told = rules(Config(), section, 1)
    assert getattr(told, name) == getattr(section, name) != default
    if name in _COSTS:
        assert getattr(Costs.of(told), name) == getattr(section, name)


@pytest.mark.parametrize("name", [*_COSTS, "keepalive_tokens", "launch_fill", "probe_pause_s"])
def test_a_value_below_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=name):
        RouterConfig.model_validate({name: -1})


def test_a_pause_never_grows_below_the_first_one() -> None:
    section = RouterConfig(probe_pause_s=90.0)
    assert rules(Config(), section, 1).probe_pause_max_s == 90.0
