"""The notes that the keeper holds: bounded, and what several share is held once."""

from __future__ import annotations

import pytest

from services.sandbox.adapters.native.notes import NOTE_MAX, Notes


def test_what_many_notes_share_counts_once_and_goes_with_the_last() -> None:
    notes, archive = Notes(), bytes(2 << 20)
    assert notes.keep("b0", {}, b"own", "digest") is False
    assert notes.size == 0
    assert notes.keep("b0", {}, b"own", "digest", archive) is True
    for number in range(1, 1000):
        assert notes.keep(f"b{number}", {}, b"own", "digest") is True
    assert notes.size == len(archive) + 3000
    assert notes.shared(notes.of("b999")) == archive
    for number in range(999):
        notes.forget(f"b{number}")
    assert notes.size == len(archive) + 3
    notes.keep("b999", {}, b"newer")
    assert notes.size == 5
    assert notes.shared(notes.of("b999")) == b""


def test_a_box_that_shares_something_else_lets_go_of_what_it_shared() -> None:
    notes = Notes()
    notes.keep("a", {}, b"", "one", b"1" * 100)
    notes.keep("a", {}, b"", "two", b"2" * 10)
    assert notes.size == 10
    assert notes.shared(notes.of("a")) == b"2" * 10


@pytest.mark.parametrize(
    ("data", "shared"), [(bytes(NOTE_MAX + 1), b""), (b"", bytes(NOTE_MAX + 1))]
)
def test_a_note_that_is_too_much_leaves_the_one_before_it(data: bytes, shared: bytes) -> None:
    notes = Notes()
    notes.keep("a", {"pids": 1}, b"old")
    with pytest.raises(OSError, match="more than is kept"):
        notes.keep("a", {}, data, "digest" if shared else "", shared)
    assert (notes.of("a").data, notes.of("a").limits, notes.size) == (b"old", {"pids": 1}, 3)


def test_all_notes_together_are_bounded() -> None:
    notes = Notes()
    for number in range(64):
        notes.keep(f"b{number}", {}, b"", f"digest{number}", bytes(NOTE_MAX))
    with pytest.raises(OSError, match="of all boxes"):
        notes.keep("more", {}, b"", "another", b"1")
    assert notes.size == 256 << 20
