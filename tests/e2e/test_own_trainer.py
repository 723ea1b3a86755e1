"""A trainer of one's own, on real parts: the examples as they stand, against the real engine.

Each starts a `muster up --without trainer`, runs one example for three steps as its own process,
and compares what the engine says with what a fresh engine says from the weights that the example
saved. Some minutes each.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from muster.audit import audit
from muster.client import MusterClient
from muster.config import RedisConfig
from muster.record import RunRecord, read_record
from muster.streams import connect
from muster.supervise.state import runtime_dir
from muster.types import SamplingParams
from tests.e2e.leftovers import Muster
from tests.e2e.test_whole import ONE_COMMAND, TASKS, WAIT_S, Scores, _ready, _replica
from tests.integration.test_inference_weights import Redises, Service

pytestmark = [
    pytest.mark.engine,
    pytest.mark.root,
    pytest.mark.timeout(2400),
    pytest.mark.filterwarnings("ignore"),
]
EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, GROUPS, SIBLINGS = 3, 2, 2


@dataclass
class Trained:
    """What a run with a trainer of one's own left behind."""

    record: RunRecord
    versions: set[int]
    scores: Scores
    said: str


async def _train(folder: Path, *command: str) -> Trained:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    config = folder / "muster.toml"
    config.write_text(f"groups_per_batch = {GROUPS}\n[router]\nlisten = '{address}'\n")
    state = folder / "state"
    muster = Muster(state, "up", "--without", "trainer", config=config)
    try:
        await asyncio.wait_for(asyncio.to_thread(muster.until, _ready), WAIT_S)
        url = f"unix://{runtime_dir(state.resolve())}/valkey.sock"
        async with connect(RedisConfig(url=url)) as redis, MusterClient(address) as client:
            tasks = [TASKS / name for name in ONE_COMMAND]
            job = await client.submit(
                tasks,
                groups=STEPS * GROUPS,
                group_size=SIBLINGS,
                sampling=SamplingParams(temperature=0.7),
            )
            environment = dict(os.environ, MUSTER_STATE_DIR=str(state), OMP_NUM_THREADS="1")
            done = await asyncio.to_thread(
                subprocess.run,
                [sys.executable, *command],
                env=environment,
                capture_output=True,
                text=True,
                timeout=3 * WAIT_S,
            )
            assert done.returncode == 0, done.stderr[-4000:]
            assert (await client.get(job)).groups_trained == STEPS * GROUPS
            async with _replica(redis) as replica:
                versions, scores = await replica.scores()
            record = await read_record(redis, "main")
    finally:
        status, _ = await asyncio.to_thread(muster.interrupt)
    assert status == 0
    return Trained(record, versions, scores, done.stdout)


async def _fresh(folder: Path, checkpoint: Path) -> Scores:
    """What a fresh engine says of the same texts from a model folder."""
    async with Redises.running(folder) as url, connect(RedisConfig(url=url)) as redis:
        config = folder / "fresh.toml"
        config.write_text(
            f'state_dir = "{folder}"\nredis.url = "{url}"\nmodel.path = "{checkpoint}"\n'
        )
        async with Service(config, redis).running() as replica:
            return (await replica.scores())[1]


def _is_whole(trained: Trained) -> None:
    found = audit(trained.record)
    assert [f for f in found.findings if f.severity != "note"] == []
    assert found.totals.batches_trained == STEPS
    assert trained.versions == {STEPS}
    digests = {v.version: v.digest for v in trained.record.versions}
    assert sorted(digests) == [0, 1, 2, 3]
    published = [v.version for v in trained.record.versions if v.published]
    assert published == [1, 2, 3]


async def test_forty_lines_of_pytorch_train_three_steps(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    script = EXAMPLES / "plain_pytorch.py"
    trained = await _train(tmp_path, str(script), str(checkpoints), str(STEPS))
    assert trained.said.splitlines()[-1] == "step 3: version 3, 1 replicas"
    _is_whole(trained)
    (tmp_path / "fresh").mkdir()
    assert await _fresh(tmp_path / "fresh", checkpoints / "step-000003") == trained.scores


@pytest.mark.skipif(
    importlib.util.find_spec("trl") is None,
    reason='TRL is not installed: pip install "muster-rl[trl]"',
)
async def test_trl_as_it_is_trains_three_steps(tmp_path: Path) -> None:
    output, script = tmp_path / "output", EXAMPLES / "trl_grpo.py"
    command = (str(script), str(output), str(STEPS), str(GROUPS * SIBLINGS))
    trained = await _train(tmp_path, *command)
    assert trained.said.splitlines()[-1] == "version 3 is served"
    _is_whole(trained)
    (tmp_path / "fresh").mkdir()
    assert await _fresh(tmp_path / "fresh", output / "checkpoint-3") == trained.scores
