"""`muster demo` on real parts, twice: engine, boxes, training, publication.

One demo takes minutes, so the stories share two of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from muster.attach import attached
from muster.config import load_config
from muster.record import RunRecord, read_record

pytestmark = [pytest.mark.engine, pytest.mark.root, pytest.mark.timeout(1800)]

DEMO_S = 600.0  # in which a demo's batches are trained, or it ends and says what is waited for

MUSTER = str(Path(sys.executable).with_name("muster"))


@dataclass(frozen=True)
class Demo:
    """What one demo said, and what the run holds after it."""

    state: Path
    status: int
    lines: list[dict[str, Any]]
    record: RunRecord

    @property
    def report(self) -> dict[str, Any]:
        [found] = [line for line in self.lines if line["event"] == "report"]
        return found


def _demo(folder: Path) -> Demo:
    environment = dict(os.environ, MUSTER_STATE_DIR=str(folder))
    command = [MUSTER, "demo", "--json", "--timeout-s", str(DEMO_S)]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    state = folder / "demo"
    config = load_config(None, {"MUSTER_STATE_DIR": str(state)})

    async def read() -> RunRecord:
        async with attached(config) as redis:
            history = config.history(config.run)
            return await read_record(redis, config.run, history)

    return Demo(state, done.returncode, lines, asyncio.run(read()))


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> tuple[Demo, Demo]:
    folder = tmp_path_factory.mktemp("demo")
    return _demo(folder), _demo(folder)


def test_it_ends_well_and_so_does_a_second_one(demos: tuple[Demo, Demo]) -> None:
    assert [demo.status for demo in demos] == [0, 0]


def test_each_demo_trains_and_publishes_two_new_batches(demos: tuple[Demo, Demo]) -> None:
    assert [len(demo.report["batches"]) for demo in demos] == [2, 4]
    published = [v.version for v in demos[1].record.versions if v.published]
    assert published == sorted(set(published))
    assert {1, 2, 3, 4} <= set(published)


def test_every_batch_is_four_groups_of_four(demos: tuple[Demo, Demo]) -> None:
    assert [batch["groups"] for batch in demos[1].report["batches"]] == [4] * 4
    assert [batch["trajectories"] for batch in demos[1].report["batches"]] == [16] * 4


def test_every_step_has_something_to_learn_from(demos: tuple[Demo, Demo]) -> None:
    assert all(batch["groups_with_variance"] >= 1 for batch in demos[1].report["batches"])


def test_every_version_has_other_weights(demos: tuple[Demo, Demo]) -> None:
    digests = {v.version: v.digest for v in demos[1].record.versions}
    assert len(set(digests.values())) == len(digests) >= 5


def test_no_replica_missed_a_publication(demos: tuple[Demo, Demo]) -> None:
    published = [v for v in demos[1].record.versions if v.published and v.version > 0]
    assert all(v.publications and not any(p.error for p in v.publications) for v in published)


def test_tokens_were_sampled_from_the_versions_that_were_published(
    demos: tuple[Demo, Demo],
) -> None:
    sampled = {span.version for turn in demos[1].record.turns for span in turn.spans}
    assert {0, 1, 2, 3} <= sampled


def test_the_audit_and_every_journal_agree(demos: tuple[Demo, Demo]) -> None:
    state = demos[1].state
    audit = subprocess.run([MUSTER, "audit", "--state-dir", str(state)])
    journals = subprocess.run([MUSTER, "journal", "verify", str(state / "journal")])
    assert (audit.returncode, journals.returncode) == (0, 0)
