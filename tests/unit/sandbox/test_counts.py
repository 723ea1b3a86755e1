"""Figures of a host: quantiles by nearest rank, of the newest durations."""

from __future__ import annotations

from pathlib import Path

from services.sandbox.adapters import hostload
from services.sandbox.counts import Counts, Quantiles


def test_quantiles_are_durations_that_happened() -> None:
    counts = Counts()
    for number in range(100, 0, -1):
        counts.took("step", number / 10)
    assert counts.seconds() == {"step": Quantiles(100, 5.0, 9.0, 9.9)}


def test_one_duration_is_all_of_them() -> None:
    counts = Counts()
    counts.took("fork", 2.5)
    assert counts.seconds() == {"fork": Quantiles(1, 2.5, 2.5, 2.5)}


def test_the_newest_count_and_all_are_counted() -> None:
    counts = Counts()
    for _ in range(2000):
        counts.took("wait", 9.0)
    for _ in range(1024):
        counts.took("wait", 1.0)
    assert counts.seconds() == {"wait": Quantiles(3024, 1.0, 1.0, 1.0)}


def test_load_and_memory_are_read_as_the_kernel_writes_them(tmp_path: Path) -> None:
    (tmp_path / "loadavg").write_text("0.25 1.50 2.75 3/456 7890\n", "ascii")
    memory = "MemTotal:       2048 kB\nMemFree: 1 kB\nMemAvailable:    1024 kB\n"
    (tmp_path / "meminfo").write_text(memory, "ascii")
    found = hostload.read(tmp_path)
    assert found.load == (0.25, 1.5, 2.75)
    assert (found.memory_total, found.memory_available) == (2 << 20, 1 << 20)
    assert found.processors >= 1


def test_a_machine_that_tells_nothing_is_no_error(tmp_path: Path) -> None:
    found = hostload.read(tmp_path)
    assert (found.load, found.memory_total) == ((), 0)
