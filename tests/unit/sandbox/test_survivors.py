"""What outlives a service: notes within bounds, and the name of the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.sandbox.adapters.native import notes
from services.sandbox.adapters.native.survivors import host_id

LIMITS = {"pids": 8}


def test_the_newest_note_counts() -> None:
    kept = notes.Notes()
    kept.keep("a", LIMITS, b"1")
    kept.keep("a", LIMITS, b"2")
    assert (kept.names, kept.of("a").data, kept.of("a").limits) == (["a"], b"2", LIMITS)


def test_a_seal_is_remembered_with_the_newest_turn_and_survives_a_note() -> None:
    kept = notes.Notes()
    kept.keep("a", LIMITS, b"1")
    kept.seal("a", 7)
    kept.keep("a", LIMITS, b"2")
    assert (kept.of("a").sealing, kept.of("a").newest) == (True, 7)


def test_notes_are_bounded_each_and_together() -> None:
    kept, largest = notes.Notes(), bytes(notes.NOTE_MAX)
    with pytest.raises(OSError, match="more than is kept"):
        kept.keep("a", LIMITS, largest + b"x")
    assert kept.names == []
    for number in range(64):
        kept.keep(str(number), LIMITS, largest)
    with pytest.raises(OSError, match="more than is kept"):
        kept.keep("one more", LIMITS, b"x")
    kept.keep("0", LIMITS, b"")  # a smaller one in its place
    kept.keep("one more", LIMITS, b"x")
    kept.forget("1")
    kept.keep("another", LIMITS, largest)


def test_a_host_keeps_its_name(tmp_path: Path) -> None:
    first = host_id(tmp_path / "boxes")
    assert first
    assert host_id(tmp_path / "boxes") == first
    assert host_id(tmp_path / "others") != first
    assert [path.name for path in (tmp_path / "boxes").iterdir()] == ["host_id"]


def test_a_host_id_file_that_holds_nothing_is_told(tmp_path: Path) -> None:
    (tmp_path / "host_id").touch()
    with pytest.raises(OSError, match="remove it"):
        host_id(tmp_path)
