"""The soak of bench/box_soak.py, small: a killed service loses, repeats and leaves nothing."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="native boxes need root")
@pytest.mark.timeout(600)
async def test_thirty_boxes_outlive_five_kills(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.box_soak", "--boxes", "30", "--steps", "200"),
        *("--kills", "5", "--at-once", "6", "--json", str(tmp_path / "soak.json")),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    figures = json.loads((tmp_path / "soak.json").read_text("utf-8"))["figures"]
    assert (figures["boxes"], figures["steps"], figures["kills"]) == (30, 200, 5)
