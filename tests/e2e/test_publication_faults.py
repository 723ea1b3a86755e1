"""Real engines and trainers are killed in the middle of publications, while a canary asks them.

Every answer is compared, bit for bit, with fresh engines that were started with the weights of
exactly the version that the answer names. About twenty minutes.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from muster.model import ensure_model
from tests.faults import publication
from tests.faults.publication_doctored import DOCTORED

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore"),
]


async def test_whatever_dies_in_a_publication_no_answer_is_of_mixed_weights(tmp_path: Path) -> None:
    spec = os.environ.get("MUSTER_TEST_MODEL", "smollm2-135m-instruct")
    results = await publication.run(tmp_path, "vllm", ensure_model(spec, Path(".muster/cache")))
    faults = len(DOCTORED) + len(publication.ENGINE_KILLS) + len(publication.TRAINER_KILLS)
    assert len(results) == faults + 7  # start, end, join, two at once, two in phases, the canary
    assert [r for r in results if r.problems] == []
