"""What the driver makes of records that a power cut took."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from services.trainer import ports
from tests.unit.trainer.test_driver import Stage


async def test_a_version_whose_record_is_lost_keeps_its_number(tmp_path: Path) -> None:
    """Its tokens would be taken for those of another one, and its replicas for served."""
    stage = Stage(tmp_path)
    stage.settings = replace(stage.settings, checkpoint_every=9)
    await stage.run()
    stage.versions.records = [r for r in stage.versions.records if r.version < 2]
    stage.fleet.failing = {"b"}  # it goes on with version 2
    stage.settings = replace(stage.settings, epoch=2)
    await stage.run()
    sealed = [r for r in stage.versions.records if r.stage is ports.Stage.TRAINED]
    assert [(r.version, r.parent) for r in sealed] == [(1, 0), (3, 0), (4, 3)]
