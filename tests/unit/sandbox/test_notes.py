"""Notes with boxes: read back whole, or their box ends and says why."""

from __future__ import annotations

import msgspec
import pytest

from muster.types import EpisodeKey, Limits
from services.sandbox import notes
from services.sandbox.box import Evidence, KeptStep, Snapshot, Survivor
from services.sandbox.layers import Layer
from services.sandbox.notes import Note

NOTE = Note(
    EpisodeKey("run", "g", 0, 1, 5),
    "task",
    "digest",
    Limits(),
    "host",
    (Layer("L-2", "L-1", Snapshot(1, 2, "/job", {"A": "b"})), Layer("L-1", "", Snapshot(), "c")),
    3,
    "b-1",
    "WARM",
    0.5,
    7.0,
)
STEP = KeptStep(4, "true", Evidence())


def box(note: Note = NOTE, **facts: object) -> Survivor:
    return Survivor("b", Limits(), notes.write(note), **facts)  # type: ignore[arg-type]


def test_a_note_comes_back_as_it_was_written() -> None:
    found = notes.read(box())
    assert found == NOTE


def test_an_archive_comes_back_as_it_was_packed() -> None:
    assert notes.unpacked(notes.packed(b"archive" * 1000)) == b"archive" * 1000


def test_what_an_agent_exported_is_in_no_note() -> None:
    layer = Layer("L-1", "", Snapshot(5, 2, "/job", {"A": "\udcff"}), needs=("L-0",))
    kept = notes.without_session(layer)
    assert kept == Layer("L-1", "", Snapshot(5, 2), needs=("L-0",))
    assert notes.read(box(msgspec.structs.replace(NOTE, layers=(kept,)))) != ""


def test_of_the_boxes_of_one_attempt_the_newest_goes_on() -> None:
    def of(since: float, **changes: object) -> Note:
        return msgspec.structs.replace(
            NOTE, since=since, key=msgspec.structs.replace(NOTE.key, **changes)
        )

    found = [("b1", of(2.0)), ("b2", of(9.0)), ("b3", of(5.0, owner_epoch=9))]
    assert notes.newest_of_each([*found, ("b4", of(1.0, sibling=1))]) == {"b2", "b4"}


def test_a_box_without_a_note_was_nobody_s() -> None:
    assert notes.read(Survivor("b", Limits())) == "nobody used it"


@pytest.mark.parametrize("data", [b"\xff", b"junk", msgspec.msgpack.encode({"key": 1})])
def test_an_unreadable_note_is_none(data: bytes) -> None:
    assert isinstance(notes.read(Survivor("b", Limits(), data)), str)


def test_a_note_of_another_form_is_none() -> None:
    assert isinstance(notes.read(box(msgspec.structs.replace(NOTE, form=1))), str)


def test_a_box_whose_newest_step_has_no_answer_is_not_taken_over() -> None:
    assert isinstance(notes.read(box(kept=(STEP,), newest_turn=4)), Note)
    assert isinstance(notes.read(box(running=(4, "true"), newest_turn=4)), Note)
    assert isinstance(notes.read(box(newest_turn=3)), Note)  # it ran before the fork
    assert notes.read(box(kept=(STEP,), newest_turn=5)) == "the result of turn 5 was lost"


@pytest.mark.parametrize("data", [b"", b"junk", notes.packed(b"whole")[:-3]])
def test_an_archive_that_is_cut_or_no_archive_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"too large, or cut short|incorrect header"):
        notes.unpacked(data)


def test_an_archive_that_would_unfold_without_end_is_an_error() -> None:
    with pytest.raises(ValueError, match="too large"):
        notes.unpacked(notes.packed(b"\0" * (16 << 20)))
