"""A publisher of one's own and the reference trainer say the same of the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from muster.engine_tensors import engine_tensors, model_slots
from muster.publish import _record
from muster.registry import Registry
from muster.transfer.publisher import TransferSettings
from muster.transfer.snapshot import Snapshot
from services.trainer.adapters.fleet import InferenceFleet
from services.trainer.adapters.version_log import record_to_pb
from services.trainer.figures import StepFigures, StepReport
from services.trainer.ports import Stage, VersionRecord
from tests.unit.external.test_engine_tensors import folder as folder
from tests.unit.external.test_engine_tensors import model as model

pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def sealed(model: Any, folder: Path) -> Snapshot:
    return Snapshot.take(engine_tensors(model, model_slots(folder)), version=3, parent=2)


def test_their_weights_have_one_digest(model: Any, folder: Path) -> None:
    from services.trainer.adapters.torch_policy import TorchPolicy, TorchSettings

    policy = TorchPolicy.load(folder, TorchSettings(threads=1))
    nobody: Registry = None  # type: ignore[assignment]
    fleet = InferenceFleet(nobody, run="main", epoch=1, transfer=TransferSettings())
    assert fleet.take(policy.engine_state(), 3, 2) == sealed(model, folder).manifest.digest
    assert engine_tensors(folder).keys() == policy.engine_state().keys()


def test_their_records_are_the_same(model: Any, folder: Path) -> None:
    made = sealed(model, folder)
    report = StepReport(
        step=3,
        figures=StepFigures(step_kl=0.5, step_kl_tokens=8),
        tokens=0,
        trajectories=0,
        groups_with_variance=0,
        groups=0,
        excluded=0,
        lag_mean_versions=0.0,
    )
    theirs = VersionRecord(3, 2, made.manifest.digest, "", Stage.TRAINED, report)
    told = record_to_pb(theirs)
    for of_the_loss in ("ess_fraction", "ess_turn"):  # a publisher knows nothing of one
        told.step.ClearField(of_the_loss)
    assert _record(made, 3, 0.5) == told
