"""What the trainer's settings must agree on with others."""

from __future__ import annotations

import pytest

from muster.errors import ConfigError
from services.inference.config import InferenceConfig
from services.readybank.config import ReadyBankConfig
from services.trainer.adapters.torch_policy import TorchSettings, settings_of
from services.trainer.config import TrainerConfig, check
from services.trainer.loss import LossSettings


def test_steps_between_checkpoints_fit_what_the_bank_leases() -> None:
    bank = ReadyBankConfig(unacknowledged_max=4)
    check(TrainerConfig(checkpoint_every=4), {"readybank": bank})
    with pytest.raises(ConfigError, match=r"trainer\.checkpoint_every = .5.*set it to 4 at most"):
        check(TrainerConfig(checkpoint_every=5), {"readybank": bank})


def test_a_publication_lasts_no_longer_than_replicas_allow() -> None:
    replicas = InferenceConfig(receive_timeout_s=600.0)
    check(TrainerConfig(publish_deadline_s=600.0), {"inference": replicas})
    with pytest.raises(ConfigError, match=r"trainer\.publish_deadline_s = .*set it to 600 at most"):
        check(TrainerConfig(publish_deadline_s=601.0), {"inference": replicas})


def test_weights_that_are_trained_are_sent() -> None:
    check(TrainerConfig(policy="fake", transport="none"), {})
    with pytest.raises(ConfigError, match="transport"):
        check(TrainerConfig(transport="none"), {})


def test_the_engine_part_is_not_counted_twice() -> None:
    check(TrainerConfig(bypass=True, correction="none"), {})
    with pytest.raises(ConfigError, match=r'trainer\.correction.*set it to "none"'):
        check(TrainerConfig(bypass=True), {})


def test_bounds_of_the_mask_lie_apart() -> None:
    check(TrainerConfig(correction="mis", mis_low=1.0, mis_high=1.1), {})
    with pytest.raises(ConfigError, match=r"trainer\.mis_high"):
        check(TrainerConfig(correction="mis", mis_low=1.0, mis_high=1.0), {})


def test_frozen_weights_go_with_everything() -> None:
    check(TrainerConfig(frozen=True, epochs=4, correction="none", bypass=True), {})


@pytest.mark.parametrize("correction", ["tis", "mis"])
def test_bypass_refuses_every_weight_on_top(correction: str) -> None:
    with pytest.raises(ConfigError, match="count it twice"):
        check(TrainerConfig.model_validate({"bypass": True, "correction": correction}), {})


def test_bounds_of_a_mask_that_is_not_used_do_not_matter() -> None:
    check(TrainerConfig(correction="tis", mis_low=1.0, mis_high=1.0), {})


def test_what_the_loss_is_told_is_what_was_configured() -> None:
    config = TrainerConfig(
        correction="mis",
        mis_low=0.25,
        mis_high=4.0,
        eps_low=0.1,
        eps_high=0.3,
        tis_cap=3.0,
        head_dtype="bfloat16",
        on_policy_max=0.5,
        frozen=True,
    )
    settings = settings_of(config)
    assert settings.loss == LossSettings(0.1, 0.3, "mis", 3.0, 0.25, 4.0)
    assert (settings.head_dtype, settings.on_policy_max, settings.frozen) == ("bfloat16", 0.5, True)


def test_defaults_of_the_policy_are_those_of_the_configuration() -> None:
    """But for the comparison with an engine, which a policy by itself does not have."""
    assert settings_of(TrainerConfig(on_policy_max=0.0)) == TorchSettings()


@pytest.mark.parametrize(
    ("transport", "folder"), [("stored", ""), ("gloo", "/versions"), ("none", "/versions")]
)
def test_versions_are_stored_in_a_folder_and_only_then(transport: str, folder: str) -> None:
    policy = "fake" if transport == "none" else "torch"
    mine = TrainerConfig(transport=transport, transport_folder=folder, policy=policy)
    with pytest.raises(ConfigError) as refused:
        check(mine, {})
    assert refused.value.field == "trainer.transport_folder"
