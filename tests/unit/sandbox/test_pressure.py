"""Pressure files: what they say, and what a kernel that tells nothing leaves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.sandbox.adapters.native import pressure

TEXT = (
    "some avg10=1.50 avg60=0.20 avg300=0.00 total=1250000\nfull avg10=0 avg60=0 avg300=0 total=7\n"
)


def stalls(folder: Path) -> dict[str, float]:
    return pressure.stalls(lambda name: os.open(folder / name, os.O_RDONLY))


def test_the_total_of_some_is_told_in_seconds(tmp_path: Path) -> None:
    for kind in pressure.KINDS:
        (tmp_path / f"{kind}.pressure").write_text(TEXT)

    assert stalls(tmp_path) == {"cpu_stall_s": 1.25, "memory_stall_s": 1.25, "io_stall_s": 1.25}
    assert pressure.told(str(tmp_path))


@pytest.mark.parametrize("text", ["", "full total=7\n", "some avg10=0.00\n", "some total=none\n"])
def test_what_is_not_told_is_minus_one(tmp_path: Path, text: str) -> None:
    (tmp_path / "cpu.pressure").write_text(text)

    assert stalls(tmp_path) == {"cpu_stall_s": -1, "memory_stall_s": -1, "io_stall_s": -1}
    assert not pressure.told(str(tmp_path))


V2 = "usage_usec 9000000\nnr_periods 45\nnr_throttled 44\nthrottled_usec 1500000\n"
V1 = "nr_periods 45\nnr_throttled 44\nthrottled_time 1500000000\nnr_bursts 0\n"


@pytest.mark.parametrize("text", [V2, V1])
def test_what_a_processor_limit_held_back_is_told_in_seconds(text: str) -> None:
    assert pressure.throttled(text) == 1.5


def test_a_counter_that_says_nothing_of_it_is_refused() -> None:
    with pytest.raises(ValueError, match="no line"):
        pressure.throttled("usage_usec 9000000\n")


@pytest.mark.parametrize(("told", "held", "left"), [(2.0, 1.5, 0.5), (1.0, 3.0, 0.0), (-1, 1, -1)])
def test_what_the_limit_held_back_is_no_stall_of_the_host(
    told: float, held: float, left: float
) -> None:
    found = pressure.without({"cpu_stall_s": told, "io_stall_s": 4.0}, held)
    assert found == {"cpu_stall_s": left, "io_stall_s": 4.0}
