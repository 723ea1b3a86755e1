"""What the trainer's settings must agree on with others."""

from __future__ import annotations

import pytest

from muster.errors import ConfigError
from services.readybank.config import ReadyBankConfig
from services.trainer.config import TrainerConfig, check


def test_steps_between_checkpoints_fit_what_the_bank_leases() -> None:
    bank = ReadyBankConfig(unacknowledged_max=4)
    check(TrainerConfig(checkpoint_every=4), {"readybank": bank})
    with pytest.raises(ConfigError, match=r"trainer\.checkpoint_every = .5.*set it to 4 at most"):
        check(TrainerConfig(checkpoint_every=5), {"readybank": bank})


def test_weights_that_are_trained_are_sent() -> None:
    check(TrainerConfig(policy="fake", transport="none"), {})
    with pytest.raises(ConfigError, match="transport"):
        check(TrainerConfig(transport="none"), {})
