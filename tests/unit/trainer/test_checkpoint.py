"""A checkpoint is there whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from muster.errors import InvalidInput, Refused
from services.trainer.adapters.checkpoint import CheckpointMeta, CheckpointStore
from services.trainer.figures import StepFigures, StepReport
from services.trainer.lineage import NO_PARENT, Lineage
from services.trainer.policy import Stopped


def meta(step: int) -> CheckpointMeta:
    parents = {v: v - 1 for v in range(step + 1)} | {0: NO_PARENT}
    report = StepReport(step, StepFigures(loss=0.25), 10, 4, 1, 2, 0, 0.0)
    return CheckpointMeta("run", step, step, step - 1, "d", 1, Lineage(parents, step), report)


def writes(text: str) -> Callable[[str], None]:
    return lambda folder: (Path(folder) / "weights").write_text(text) and None


def going() -> bool:
    return False


def test_what_was_saved_is_found_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "c", "run", keep=2)
    folder = store.save(meta(1), writes("one"), going)
    found = store.newest()
    assert found is not None
    assert found[0] == folder
    assert found[1].lineage == meta(1).lineage
    assert found[1].report == meta(1).report
    assert (folder / "weights").read_text() == "one"


def test_before_the_first_there_is_none(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "none", "run", keep=2).newest() is None


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, "run", keep=2)
    for step in (1, 2, 3):
        store.save(meta(step), writes("x"), going)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003"]


def test_a_crash_while_writing_leaves_the_one_before(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, "run", keep=2)
    store.save(meta(1), writes("one"), going)

    def crash(folder: str) -> None:
        (Path(folder) / "weights").write_text("half")
        raise OSError("power cut")

    with pytest.raises(OSError, match="power cut"):
        store.save(meta(2), crash, going)
    found = store.newest()
    assert found is not None
    assert found[1].step == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_a_stop_while_saving_leaves_no_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, "run", keep=2)
    with pytest.raises(Stopped):
        store.save(meta(1), writes("x"), lambda: True)
    assert store.newest() is None


def test_one_that_lacks_a_required_file_is_not_finished(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, "run", keep=1, required=("weights", "config.json"))
    with pytest.raises(Refused, match=r"lacks config\.json"):
        store.save(meta(1), writes("x"), going)
    assert store.newest() is None


def test_files_below_the_folder_are_checked_too(tmp_path: Path) -> None:
    def write(folder: str) -> None:
        (Path(folder) / "deep").mkdir()
        (Path(folder) / "deep" / "state").write_text("one")

    store = CheckpointStore(tmp_path, "run", keep=2)
    folder = store.save(meta(1), write, going)
    (folder / "deep" / "state").write_text("two")
    with pytest.raises(InvalidInput, match="deep/state"):
        store.newest()


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_damage_is_an_error_and_never_an_older_checkpoint(tmp_path: Path, damage: str) -> None:
    store = CheckpointStore(tmp_path, "run", keep=2)
    store.save(meta(1), writes("one"), going)
    file = store.save(meta(2), writes("two"), going) / "weights"
    if damage == "gone":
        file.unlink()
    else:
        file.write_text("tw" if damage == "cut" else "tvo")
    with pytest.raises(InvalidInput, match="weights is not what was written"):
        store.newest()


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    CheckpointStore(tmp_path, "run", keep=2).save(meta(1), writes("x"), going)
    with pytest.raises(InvalidInput, match="belongs to run 'run'"):
        CheckpointStore(tmp_path, "other", keep=2).newest()


def test_the_step_of_an_abandoned_branch_is_replaced(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, "run", keep=2)
    store.save(meta(1), writes("old"), going)
    assert (store.save(meta(1), writes("new"), going) / "weights").read_text() == "new"
