"""What a log says about an end, and its bound."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest

from muster.supervise.logs import last_words, rotate


def _log(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def _record(level: str, text: str) -> str:
    return json.dumps({"level": level, "text": text})


def test_a_persons_line_is_given_as_it_stands(tmp_path: Path) -> None:
    line = "router: router.listen = '127.0.0.1:7400': taken → choose another"
    log = _log(tmp_path / "a.log", _record("ERROR", "noise"), line, _record("INFO", "bye"))
    assert last_words(log, 0, 2) == line


def test_a_crash_is_told_by_the_last_line_of_its_traceback(tmp_path: Path) -> None:
    log = _log(tmp_path / "a.log", _record("INFO", "x"), "Traceback", "  File", "KeyError: 'a'")
    assert last_words(log, 0, 1) == "KeyError: 'a' (line 4 of logs/a.log)"


def test_the_frame_around_an_exception_group_is_no_word(tmp_path: Path) -> None:
    lines = ("  | ExceptionGroup", "  +-+---", "    | AttributeError: 'shape'", "    +-------")
    log = _log(tmp_path / "a.log", *lines)
    assert last_words(log, 0, 1) == "AttributeError: 'shape' (line 3 of logs/a.log)"


def test_without_plain_lines_the_newest_error_counts(tmp_path: Path) -> None:
    log = _log(tmp_path / "a.log", _record("ERROR", "broken"), _record("INFO", "bye"))
    assert last_words(log, 0, 1) == "broken (line 1 of logs/a.log)"


def test_words_of_an_earlier_start_are_not_blamed(tmp_path: Path) -> None:
    log = _log(tmp_path / "a.log", "ValueError: of the first start")
    assert last_words(log, log.stat().st_size, 1) == "it left no word in its log"


def test_the_line_is_counted_from_the_beginning_of_the_file(tmp_path: Path) -> None:
    log = _log(tmp_path / "a.log", *["earlier"] * 20_000)
    start = log.stat().st_size
    with log.open("a") as more:
        more.write("\nboom\n")
    assert last_words(log, start, 1) == "boom (line 20002 of logs/a.log)"


def test_a_second_process_of_a_role_speaks_under_the_roles_name(tmp_path: Path) -> None:
    log = _log(tmp_path / "router-2.log", "router: a newer router leads", "TypeError: at exit")
    assert last_words(log, 0, 2) == "router: a newer router leads"


def test_control_characters_never_reach_a_terminal(tmp_path: Path) -> None:
    log = _log(tmp_path / "a.log", "evil \x1b]0;title\x07")
    assert last_words(log, 0, 1) == r"evil \x1b]0;title\x07 (line 1 of logs/a.log)"


def test_a_log_over_its_limit_is_kept_once_and_emptied_in_place(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    with path.open("ab", buffering=0) as writer:
        writer.write(b"12345")
        rotate(path, 4)
        writer.write(b"6")
    assert (tmp_path / "a.log.1").read_bytes() == b"12345"
    assert path.read_bytes() == b"6"


def test_a_log_within_its_limit_stays(tmp_path: Path) -> None:
    path = _log(tmp_path / "a.log", "1")
    rotate(path, 100)
    assert path.read_text() == "1\n"


def test_a_killed_process_is_not_said_to_have_died_of_its_last_line(tmp_path: Path) -> None:
    log = _log(tmp_path / "a.log", "Loading weights: 100%")
    assert "SIGKILL" in last_words(log, 0, 137)


def test_the_services_own_line_counts_before_what_libraries_say_at_exit(tmp_path: Path) -> None:
    log = _log(tmp_path / "inference.log", "inference: no such model", "TypeError: at exit")
    assert last_words(log, 0, 2) == "inference: no such model"


@pytest.mark.parametrize("free", [1, 1 << 20])
def test_a_log_that_has_no_room_for_its_copy_stays_whole_and_so_does_the_former(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    log = _log(tmp_path / "a.log", "x" * 99)
    former = _log(tmp_path / "a.log.1", "before")

    def full(path: Path, fresh: Path) -> None:
        fresh.write_text("x")
        raise OSError(errno.ENOSPC, "No space left on device")

    usage = shutil.disk_usage(tmp_path)._replace(free=free)
    monkeypatch.setattr("muster.supervise.logs.shutil.copyfile", full)
    monkeypatch.setattr("muster.supervise.logs.shutil.disk_usage", lambda path: usage)
    rotate(log, 10)
    assert (log.read_text(), former.read_text()) == ("x" * 99 + "\n", "before\n")
    assert sorted(tmp_path.iterdir()) == [log, former]
