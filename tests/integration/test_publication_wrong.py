"""Versions that are not what they say, sent to a running replica of a running trainer.

The engine is the scripted one, which receives and verifies every byte; tests/e2e has the real one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import publication
from tests.faults.publication_doctored import DOCTORED, tiny_model

pytestmark = pytest.mark.timeout(900)


async def test_a_wrong_version_leaves_no_trace_and_the_next_one_is_served(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    results = await publication.run(tmp_path, "fake", model, only="sent")
    assert [r.where for r in results if r.fault == "sent"] == list(DOCTORED)
    assert [r for r in results if r.problems] == []
