"""The fakes that ship: what the service runs on when nothing is to be trained."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from services.trainer.adapters.fake import FakeTensors
from services.trainer.lineage import NO_PARENT, Lineage
from services.trainer.plan import plan_step
from tests.unit.trainer.stories import batch, group


def going() -> bool:
    return False


def test_a_step_changes_the_weights_and_a_checkpoint_keeps_them(tmp_path: Path) -> None:
    before = {"a": torch.zeros(3, dtype=torch.bfloat16), "b": torch.ones(2)}
    save_file(before, tmp_path / "model.safetensors")
    policy = FakeTensors.load(tmp_path)
    policy.train(plan_step(batch(*group("g", 1.0, 0.0)), Lineage({0: NO_PARENT}, 0)), going)
    (tmp_path / "c").mkdir()
    policy.write(str(tmp_path / "c"), going)
    again = FakeTensors.load(tmp_path / "c")
    assert again.engine_state()["a"].tolist() == [0.25] * 3
    assert again.engine_state()["b"].tolist() == [1.0] * 2
    assert again.steps == [1]
