"""Trimmed entries on disk: whole, once, in order, and honest about damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.errors import InvalidInput
from muster.history import History
from muster.streams import Received


def _entries(stream: str, *ids: str) -> list[Received]:
    return [Received(stream, id_, id_.encode(), "") for id_ in ids]


def test_entries_come_back_in_order_and_once(tmp_path: Path) -> None:
    """A crash between archive and trim leaves doubles."""
    history = History(tmp_path / "run")
    history.append(_entries("events", "9-0", "10-0") + _entries("fates", "9-1"))
    history.append(_entries("events", "10-0", "10-1", "10-10"))
    again = History(tmp_path / "run")
    again.append(_entries("events", "11-0"))
    assert [m.id for m in again.read("events")] == ["9-0", "10-0", "10-1", "10-10", "11-0"]
    assert again.read("events")[0] == _entries("events", "9-0")[0]
    assert [m.id for m in again.read("fates")] == ["9-1"]
    assert again.read("outcomes") == []


@pytest.mark.parametrize("left", [1, 5, 20])
def test_a_torn_end_is_ignored_and_written_over(tmp_path: Path, left: int) -> None:
    history = History(tmp_path)
    history.append(_entries("events", "1-0"))
    whole = (tmp_path / "events.mzh").stat().st_size
    history.append(_entries("events", "2-0"))
    with (tmp_path / "events.mzh").open("rb+") as file:
        file.truncate(whole + left)
    assert [m.id for m in history.read("events")] == ["1-0"]
    history.append(_entries("events", "3-0"))
    assert [m.id for m in history.read("events")] == ["1-0", "3-0"]


def test_what_another_process_tore_is_cut_off_by_this_one(tmp_path: Path) -> None:
    mine, other = History(tmp_path), History(tmp_path)
    mine.append(_entries("events", "1-0"))
    other.append(_entries("events", "2-0"))
    with (tmp_path / "events.mzh").open("ab") as file:
        file.write(b"\xff")
    mine.append(_entries("events", "3-0"))
    assert [m.id for m in mine.read("events")] == ["1-0", "2-0", "3-0"]


def test_damage_in_the_middle_is_told_with_the_file(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.append(_entries("events", "1-0", "2-0"))
    path = tmp_path / "events.mzh"
    data = bytearray(path.read_bytes())
    data[-3] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(InvalidInput) as caught:
        history.read("events")
    assert caught.value.value == str(path)


def test_a_former_writer_cannot_cut_off_what_its_follower_has_kept(tmp_path: Path) -> None:
    former, follower = History(tmp_path, "1"), History(tmp_path, "2")
    former.append(_entries("events", "1-0"))
    with (tmp_path / "events.1.mzh").open("ab") as file:
        file.write(b"\xff\x00\x00\x00half")  # it is stopped while it writes
    follower.append(_entries("events", "2-0", "3-0"))
    former.append(_entries("events", "2-0"))  # and goes on
    assert [m.id for m in History(tmp_path).read("events")] == ["1-0", "2-0", "3-0"]
