"""Which snapshots of a killed service its successor has, and which go."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.sandbox.adapters.native.backend import open_native
from tests.integration.sandbox_owner import Owner, owner

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="native boxes need root"),
]


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[Path]:
    """The runtime folder; whatever a test leaves in it, an orderly stop removes."""
    path = tmp_path / "boxes"
    yield path
    async with open_native(path):
        pass


async def test_snapshots_that_no_survivor_lies_on_are_dropped(folder: Path) -> None:
    async with owner(folder) as first:
        for layer in ("used", "unused"):
            await first.box("made")
            await first.step("made", 0, f"echo {layer} > f")
            await first.call("snapshot", "made", layer, False)
        await first.call("start", "a", "used")
        await first.call("note", "a", "mine")
        assert len(layers(first)) == 2
        await first.kill()
    async with owner(folder) as second:
        assert list(await second.survivors()) == ["a"]
        assert len(layers(second)) == 1
        await second.call("claim", ["used"])
        assert await second.step("a", 0, "/usr/bin/cat /app/f") == "used\n"
        await second.call("end", "a")
        await second.call("start", "b", "used")  # it is the successor's now, by its name
        assert await second.step("b", 0, "/usr/bin/cat /app/f") == "used\n"


async def test_a_snapshot_that_no_successor_claims_goes_with_the_last_box_on_it(
    folder: Path,
) -> None:
    async with owner(folder) as first:
        await first.box("made")
        await first.call("snapshot", "made", "kept", False)
        await first.call("start", "a", "kept")
        await first.call("note", "a", "mine")
        await first.kill()
    async with owner(folder) as second:
        assert list(await second.survivors()) == ["a"]
        await second.call("claim", [])
        assert len(layers(second)) == 1
        await second.call("end", "a")
        assert layers(second) == []


def layers(of: Owner) -> list[str]:
    """Mount points of its snapshots."""
    lines = Path(f"/proc/{of.keeper}/mountinfo").read_text("utf-8").splitlines()
    return [line.split()[4] for line in lines if "/stage/l/" in line.split()[4]]
