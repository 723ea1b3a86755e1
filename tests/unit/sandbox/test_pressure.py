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
