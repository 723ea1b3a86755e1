"""One step on the real model: what no random one can show.

Needs MUSTER_TEST_MODEL, the model folder that set-up makes.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from muster.model import ensure_model
from muster.transfer import manifest
from services.inference.adapters.checkpoint import tensor_shapes
from services.trainer.adapters.checkpoint import CheckpointMeta, CheckpointStore
from services.trainer.figures import StepReport
from services.trainer.lineage import NO_PARENT, Lineage
from services.trainer.plan import plan_step, report_step
from tests.unit.trainer.stories import batch, prompt, sampled, trajectory

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
]
LINE = Lineage({0: NO_PARENT}, 0)


def going() -> bool:
    return False


def test_a_step_is_saved_whole_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    from services.trainer.adapters.torch_policy import TorchPolicy, TorchSettings

    spec = os.environ.get("MUSTER_TEST_MODEL", "smollm2-135m-instruct")
    base = ensure_model(spec, Path(".muster/cache"))
    settings = TorchSettings(lr=1e-5)
    context = prompt(*range(1000, 1040))
    items = [
        trajectory("g", i, float(i == 0), [context, sampled(*range(2000 + i, 2008 + i))])
        for i in range(2)
    ]
    policy = TorchPolicy.load(base, settings)
    before = manifest.build(policy.engine_state(), version=0, parent=NO_PARENT)
    assert {spec.name: spec.shape for spec in before.tensors} == tensor_shapes(base)

    plan = plan_step(batch(*items), LINE)
    figures = policy.train(plan, going)
    after = manifest.build(policy.engine_state(), version=1, parent=0)
    assert after.digest != before.digest
    assert 0 < figures.step_kl < 1

    store = CheckpointStore(tmp_path, "run", keep=1)
    report: StepReport = report_step(plan, figures, 0.0)
    lineage = LINE.grow(1)
    meta = CheckpointMeta("run", 1, 1, 0, after.digest, 1, lineage, report)
    store.save(meta, lambda folder: policy.write(folder, going), going)
    found = store.newest()
    assert found is not None
    assert tensor_shapes(found[0]) == tensor_shapes(base)
    restored = TorchPolicy.load(found[0], settings)
    again = manifest.build(restored.engine_state(), version=1, parent=0)
    assert again.digest == found[1].digest
    assert restored.train(plan, going) == policy.train(plan, going)
