"""What the embedded server's own words lead to."""

from __future__ import annotations

from pathlib import Path

from muster.supervise.server_log import TORN, remark, verdict

FORMER = "Bad file format reading the append only file a.aof: make a backup\n"


def test_a_quiet_start_needs_no_remark(tmp_path: Path) -> None:
    log = tmp_path / "redis.log"
    log.write_text("1:M Ready to accept connections unix\n")
    assert remark(log, 0) == ""
    assert verdict(log, 0, data=tmp_path, server="v") == ""


def test_a_torn_end_is_told(tmp_path: Path) -> None:
    log = tmp_path / "redis.log"
    log.write_text("1:M AOF a.aof loaded anyway because aof-load-truncated is enabled\n")
    assert remark(log, 0) == TORN


def test_what_an_earlier_start_said_is_not_told_again(tmp_path: Path) -> None:
    log = tmp_path / "redis.log"
    log.write_text(FORMER)
    assert verdict(log, len(FORMER), data=tmp_path, server="v") == ""


def test_a_damaged_file_comes_with_the_command_that_mends_it(tmp_path: Path) -> None:
    log = tmp_path / "redis.log"
    log.write_text(FORMER)
    line = verdict(log, 0, data=tmp_path, server="/bin/v")
    assert line.endswith(f"(exec -a valkey-check-aof /bin/v --fix {tmp_path}/appendonlydir/a.aof)")


def test_a_full_disk_under_always_says_so(tmp_path: Path) -> None:
    log = tmp_path / "redis.log"
    log.write_text("Can't recover from AOF write error when the AOF fsync policy is 'always'.\n")
    assert "free space on that disk" in verdict(log, 0, data=tmp_path, server="v")
