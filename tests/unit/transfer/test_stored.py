"""Versions in folders: whole or not there, checked when they are read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors
import torch

from muster.errors import InvalidInput, Unavailable
from muster.transfer import stored
from muster.transfer.receiving import Staging
from muster.transfer.snapshot import Snapshot
from muster.transfer.stored import StoredSpec
from muster.transfer.wire import source_from_pb
from muster.v1 import inference_pb2 as pb

STATE = {
    "embed": torch.arange(3000, dtype=torch.bfloat16).reshape(30, 100),
    "norm": torch.ones(7, dtype=torch.float16),
    "head": torch.full((40, 11), 0.25),
}


def version(number: int) -> Snapshot:
    changed = {name: tensor + number for name, tensor in STATE.items()}
    return Snapshot.take(changed, version=number, parent=number - 1)


def spec(folder: Path) -> StoredSpec:
    return StoredSpec(str(folder), 10.0)


@pytest.mark.parametrize("shard_bytes", [1, 7000, 1 << 30])
def test_what_is_read_is_what_was_stored(tmp_path: Path, shard_bytes: int) -> None:
    made = version(3)
    folder = stored.save(made, tmp_path, shard_bytes=shard_bytes)
    found = stored.load(made.manifest, spec(folder), tmp_path, Staging())
    again = Snapshot(made.manifest, found).tensors()
    assert all(torch.equal(again[name], tensor) for name, tensor in made.tensors().items())


def test_storing_again_leaves_it_as_it_is(tmp_path: Path) -> None:
    made = version(3)
    folder = stored.save(made, tmp_path)
    before = (folder / stored.MANIFEST).stat().st_mtime_ns
    assert stored.save(made, tmp_path) == folder
    assert (folder / stored.MANIFEST).stat().st_mtime_ns == before


@pytest.mark.parametrize("harm", ["a byte", "cut short", "a shard gone", "no manifest"])
def test_storing_again_mends_what_became_of_it(tmp_path: Path, harm: str) -> None:
    made = version(3)
    folder = stored.save(made, tmp_path, shard_bytes=7000)
    shard = min(folder.glob("*.safetensors"))
    content = shard.read_bytes()
    if harm == "a byte":
        shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif harm == "cut short":
        shard.write_bytes(content[:-100])
    elif harm == "a shard gone":
        shard.unlink()
    else:
        (folder / stored.MANIFEST).unlink()

    assert stored.save(made, tmp_path) == folder
    found = stored.load(made.manifest, spec(folder), tmp_path, Staging())
    again = Snapshot(made.manifest, found).tensors()
    assert all(torch.equal(again[name], tensor) for name, tensor in made.tensors().items())


def test_what_is_broken_and_cannot_be_replaced_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = version(3)
    folder = stored.save(made, tmp_path)
    (folder / stored.MANIFEST).write_text("{}")
    removes = stored.shutil.rmtree

    def kept(path: Path, ignore_errors: bool = False) -> None:
        if path != folder:
            removes(path, ignore_errors)

    monkeypatch.setattr(stored.shutil, "rmtree", kept)
    with pytest.raises(Unavailable, match="cannot be stored"):
        stored.save(made, tmp_path)


def test_nothing_half_written_is_ever_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, tensors: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stored, "_write", full)
    with pytest.raises(Unavailable, match="No space left"):
        stored.save(version(3), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_others_left_half_written_makes_room_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".writing-version-000002-abc").mkdir()
    there: list[str] = []
    writes = stored._write

    def seen(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        there.extend(p.name for p in tmp_path.iterdir())
        writes(path, tensors)

    monkeypatch.setattr(stored, "_write", seen)
    stored.save(version(3), tmp_path)
    assert len(there) == 1
    assert there[0].startswith(".writing-version-000003")


def test_a_shard_that_the_library_cannot_write_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It raises a bare Exception of its own when the disk is full."""

    def full(tensors: object, path: str) -> None:
        raise safetensors.SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(Unavailable, match="No space left"):
        stored.save(version(3), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_shard_that_was_cut_short_is_noticed(tmp_path: Path) -> None:
    made = version(3)
    folder = stored.save(made, tmp_path)
    (folder / "00000.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(Unavailable, match="safetensors"):
        stored.load(made.manifest, spec(folder), tmp_path, Staging())


def test_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    made = version(3)
    folder = stored.save(made, tmp_path)
    shard = folder / "00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(Unavailable, match="do not have the digest"):
        stored.load(made.manifest, spec(folder), tmp_path, Staging())


def test_a_shard_that_is_gone_is_noticed(tmp_path: Path) -> None:
    made = version(3)
    folder = stored.save(made, tmp_path, shard_bytes=1)
    (folder / "00001.safetensors").unlink()
    with pytest.raises(Unavailable, match="head is missing"):
        stored.load(made.manifest, spec(folder), tmp_path, Staging())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds; it moves by what is waited, and by a second for each tensor that is read."""
    now, read = [0.0], stored._read

    def slowly(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
        for found in read(folder):
            now[0] += 1.0
            yield found

    def wait(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(stored, "_read", slowly)
    monkeypatch.setattr(stored, "monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", wait)
    return now


def test_a_disk_that_crawls_is_given_up_in_time(tmp_path: Path, clock: list[float]) -> None:
    made = version(3)
    folder = stored.save(made, tmp_path)
    with pytest.raises(Unavailable, match="not read when its time was over"):
        stored.load(made.manifest, StoredSpec(str(folder), 1.5), tmp_path, Staging())
    assert clock == [2.0]


def test_reading_keeps_to_a_rate(tmp_path: Path, clock: list[float]) -> None:
    made = version(3)
    folder = stored.save(made, tmp_path)
    spec = StoredSpec(str(folder), 1e6, bytes_per_s=100.0)
    stored.load(made.manifest, spec, tmp_path, Staging())
    before_the_last = sum(t.nbytes for t in made.manifest.tensors[:2])
    assert clock[0] >= before_the_last / 100.0


def test_a_replica_hears_of_the_rate() -> None:
    stored_weights = pb.StoredWeights(folder="f", deadline_s=10.0)
    request = pb.PrepareWeightUpdateRequest(stored=stored_weights, bytes_per_s=5.0)
    assert source_from_pb(request) == StoredSpec("f", 10.0, 5.0)


def test_another_version_is_not_taken_for_it(tmp_path: Path) -> None:
    folder = stored.save(version(3), tmp_path)
    with pytest.raises(Unavailable, match="holds version 3"):
        stored.load(version(4).manifest, spec(folder), tmp_path, Staging())


def test_no_folder_outside_the_root_is_read(tmp_path: Path) -> None:
    made = version(3)
    folder = stored.save(made, tmp_path / "elsewhere")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(folder)
    for named in (folder, tmp_path / "root" / ".." / "elsewhere", tmp_path / "root" / "link"):
        with pytest.raises(InvalidInput) as refused:
            stored.load(made.manifest, spec(named), tmp_path / "root", Staging())
        assert refused.value.field == "stored.folder"


def test_old_versions_are_collected(tmp_path: Path) -> None:
    folders = [stored.save(version(number), tmp_path) for number in (1, 2, 10)]
    (tmp_path / ".writing-version-000011-abc").mkdir()
    (tmp_path / "notes").mkdir()
    stored.collect(tmp_path, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        ["notes", folders[1].name, folders[2].name]
    )


def test_numbers_are_compared_as_numbers(tmp_path: Path) -> None:
    made = [version(1).renamed(number, number - 1) for number in (999_999, 1_000_000)]
    old, new = (stored.save(snapshot, tmp_path) for snapshot in made)
    assert stored.collect(tmp_path, keep=1) == [old]
    assert new.is_dir()


@pytest.mark.parametrize("keep", [0, 1])
def test_the_version_just_stored_is_not_collected(tmp_path: Path, keep: int) -> None:
    """Higher numbers are there: of a run of the same name whose records are gone."""
    stored.save(version(9), tmp_path)
    folder = stored.save(version(1), tmp_path)
    stored.collect(tmp_path, keep=keep, spare=folder)
    assert folder.is_dir()
