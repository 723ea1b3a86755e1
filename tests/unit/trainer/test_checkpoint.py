"""A checkpoint is there whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from muster.errors import ConfigError, Fenced, InvalidInput, Refused, Unavailable
from services.trainer.adapters import model_files
from services.trainer.adapters.checkpoint import CheckpointMeta, CheckpointStore
from services.trainer.figures import StepFigures, StepReport
from services.trainer.lineage import NO_PARENT, Lineage
from services.trainer.policy import Stopped


def meta(step: int) -> CheckpointMeta:
    parents = {v: v - 1 for v in range(step + 1)} | {0: NO_PARENT}
    report = StepReport(step, StepFigures(loss=0.25), 10, 4, 1, 2, 0, 0.0)
    return CheckpointMeta("run", step, step, step - 1, "d", 1, Lineage(parents, step), report)


def writes(text: str) -> Callable[[str], None]:
    def write(folder: str) -> None:
        (Path(folder) / "weights").write_text(text)

    return write


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


def test_a_trainer_that_slept_through_its_replacement_replaces_no_checkpoint(
    tmp_path: Path,
) -> None:
    """Where locks do not reach. It wakes with a whole draft of the step that the newer one made."""
    old, new = (CheckpointStore(tmp_path, "run", keep=2) for _ in range(2))
    old.note_epoch(1)

    def sleeps(folder: str) -> None:
        writes("old")(folder)
        new.note_epoch(2)
        new.save(replace(meta(1), trainer_epoch=2), writes("new"), going)

    with pytest.raises(Fenced):
        old.save(meta(1), sleeps, going)
    with pytest.raises(Fenced):
        old.prune(2)
    with pytest.raises(Fenced):
        old.note_epoch(1)
    assert (tmp_path / "step-000001" / "weights").read_text() == "new"
    assert new.epoch() == 2


def test_a_full_disk_is_unavailable_and_what_was_written_gives_its_room_back(
    tmp_path: Path,
) -> None:
    """So that the trainer waits for room, as it does for everything that is away."""
    store = CheckpointStore(tmp_path, "run", keep=2)

    def full(folder: str) -> None:
        writes("half")(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(Unavailable, match=r"step 1 cannot be written.*No space left"):
        store.save(meta(1), full, going)
    assert list(tmp_path.iterdir()) == []
    assert store.save(meta(1), writes("one"), going).is_dir()


def test_what_a_save_left_half_written_goes_before_the_next_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, "run", keep=2)
    with pytest.raises(Stopped):
        store.save(meta(1), writes("one"), lambda: True)

    def write(folder: str) -> None:
        assert [path.name for path in tmp_path.iterdir()] == [Path(folder).name]
        writes("two")(folder)

    store.save(meta(2), write, going)


def test_files_that_the_library_cannot_write_are_an_os_error(tmp_path: Path) -> None:
    """It raises a bare Exception of its own for a folder that is gone, as for a full disk."""
    tensors = {"a": torch.ones(2)}
    with pytest.raises(OSError, match="safetensors"):
        model_files.write_weights(tmp_path / "gone", tensors)
    with pytest.raises(OSError, match="safetensors"):
        model_files._write_shard(tmp_path / "gone", 0, tensors)


def test_before_the_first_there_is_none(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "none", "run", keep=2).newest() is None


def there(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*step-*"))


def saved(folder: Path, *steps: int, keep: int = 2) -> CheckpointStore:
    store = CheckpointStore(folder, "run", keep)
    for step in steps:
        store.save(meta(step), writes(str(step)), going)
    return store


def test_only_the_newest_stay_once_they_are_pruned(tmp_path: Path) -> None:
    store = saved(tmp_path, 1, 2, 3)
    assert there(tmp_path) == ["step-000001", "step-000002", "step-000003"]
    store.prune(store.oldest_kept())
    assert there(tmp_path) == ["step-000002", "step-000003"]


@pytest.mark.parametrize(("keep", "oldest"), [(0, 0), (4, 0), (3, 3), (2, 6), (1, 9)])
def test_the_oldest_kept_is_named_once_there_are_enough(
    tmp_path: Path, keep: int, oldest: int
) -> None:
    assert saved(tmp_path, 3, 6, 9, keep=keep).oldest_kept() == oldest


def test_a_deletion_that_was_cut_is_finished_at_the_next_start(tmp_path: Path) -> None:
    store = saved(tmp_path, 1, 2)
    (tmp_path / "step-000001").rename(tmp_path / ".deleting-step-000001")
    (tmp_path / ".deleting-step-000001" / "meta.json").unlink()  # and the power went
    assert store.newest() is not None
    assert [p.name for p in tmp_path.iterdir()] == ["step-000002"]


def test_going_back_sets_newer_checkpoints_aside(tmp_path: Path) -> None:
    store = saved(tmp_path, 1, 2, 3, keep=0)
    store.go_back(1, epoch=7)
    found = store.newest()
    assert found is not None
    assert found[1].step == 1
    assert there(tmp_path) == [
        "aside-000007-step-000002",
        "aside-000007-step-000003",
        "step-000001",
    ]


def test_going_back_is_done_once_for_a_setting_that_stays(tmp_path: Path) -> None:
    store = saved(tmp_path, 1, 2, keep=0)
    store.go_back(1, epoch=7)
    store.save(meta(2), writes("new"), going)
    store.go_back(1, epoch=8)  # the process was started again
    assert "step-000002" in there(tmp_path)
    store.forget_return()
    store.go_back(1, epoch=9)
    assert "aside-000009-step-000002" in there(tmp_path)


def test_a_return_that_was_cut_is_finished(tmp_path: Path) -> None:
    store = saved(tmp_path, 1, 2, 3, keep=0)
    (tmp_path / "step-000003").rename(tmp_path / "aside-000007-step-000003")
    store.go_back(1, epoch=8)
    assert there(tmp_path)[-1] == "step-000001"


@pytest.mark.parametrize("step", [0, 1, 2, 7])
def test_no_return_to_what_the_bank_may_have_dropped(tmp_path: Path, step: int) -> None:
    """Step 2 is still there: its deletion was cut after the bank had been told."""
    with pytest.raises(ConfigError, match="choose one of 3, 4, or"):
        saved(tmp_path, 2, 3, 4).go_back(step, epoch=1)


def test_a_damaged_checkpoint_can_be_gone_back_from(tmp_path: Path) -> None:
    store = saved(tmp_path, 1, 2)
    (tmp_path / "step-000002" / "meta.json").write_text("{")
    assert store.epoch() == 0
    store.go_back(1, epoch=2)
    found = store.newest()
    assert found is not None
    assert found[1].step == 1


def test_the_first_model_can_be_gone_back_to_while_nothing_was_deleted(tmp_path: Path) -> None:
    store = saved(tmp_path, 1, 2, keep=3)
    store.go_back(0, epoch=1)
    assert store.newest() is None


def test_the_epoch_is_the_newest_that_left_a_trace(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "c", "run", keep=2)
    assert store.epoch() == 0
    store.save(meta(1), writes("x"), going)
    assert store.epoch() == 1
    store.note_epoch(5)
    assert store.epoch() == 5


def test_a_crash_while_writing_leaves_the_one_before(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, "run", keep=2)
    store.save(meta(1), writes("one"), going)

    def crash(folder: str) -> None:
        (Path(folder) / "weights").write_text("half")
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
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


def test_a_save_that_is_tried_again_replaces_the_first(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, "run", keep=2)
    store.save(meta(1), writes("old"), going)
    assert (store.save(meta(1), writes("new"), going) / "weights").read_text() == "new"
