"""The sandbox service is killed in the middle of steps: its boxes live on, no episode notices."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from muster.archive import TaskFile, pack_files
from muster.registry import Registry
from muster.v1 import common_pb2 as pb
from muster.v1 import inference_pb2 as inf
from muster.v1 import router_pb2 as rt
from tests.integration.router_world import answer, router
from tests.integration.test_router import complete, until
from tests.integration.test_router_away import replica
from tests.integration.test_router_resume import recorded, turn_of
from tests.unit.router.test_conversation import END

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="native boxes need root"),
]
TURNS, SIBLINGS, KILLS = 6, 3, 4
# Right only when every step ran exactly once, and all of them in one box.
TEST = f"""\
test "$(cat log)" = "$(seq 0 {TURNS - 1})" && test "$(cat /app/made)" = once
echo $((1 - $?)) > /logs/verifier/reward.txt
"""
TEXTS = {
    "instruction.md": "Count.",
    "task.toml": f"[metadata]\nmuster_max_turns = {TURNS + 1}\n",
    "environment/Dockerfile": "FROM scratch\nWORKDIR /app\nRUN echo once >> made\n",
    "tests/test.sh": TEST,
}


def submission() -> rt.SubmitTaskSetRequest:
    archive = pack_files({path: TaskFile(0o644, text.encode()) for path, text in TEXTS.items()})
    digest = hashlib.sha256(archive).hexdigest()
    task = pb.TaskPackage(name="count", digest=digest, archive=archive)
    sampling = pb.SamplingParams(temperature=1.0, top_p=1.0)
    return rt.SubmitTaskSetRequest(
        job="job", tasks=[task], groups=1, group_size=SIBLINGS, sampling=sampling
    )


def counting(request: inf.GenerateRequest) -> list[inf.GenerateResponse]:
    """Steps that last long enough to be killed in, and leave what could be seen twice."""
    turn = turn_of(request)
    text = "DONE" if turn == TURNS else f"```bash\necho {turn} >> log; sleep 0.7; cat log\n```"
    return answer([*map(ord, text), END])


class Service:
    """`python -m services.sandbox` on one runtime_dir, as often as it is started."""

    def __init__(self, folder: Path, redis_url: str, run: str):
        self._config = folder / "muster.toml"
        self._config.write_text(
            f'run = "{run}"\nstate_dir = "{folder}/state"\n[redis]\nurl = "{redis_url}"\n'
            f'[sandbox]\nruntime_dir = "{folder}/boxes"\nwarm_max = 0\n'
        )
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.sandbox", "--config", str(self._config)),
            cwd=Path(__file__).parents[2],
        )

    async def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        await self.process.wait()

    async def stop(self) -> None:
        """Asked to, as a supervisor asks: nothing of it is left then."""
        if self.process is not None and self.process.returncode is None:
            self.process.terminate()
            await self.process.wait()


@asynccontextmanager
async def service(folder: Path, redis_url: str, run: str) -> AsyncIterator[Service]:
    made = Service(folder, redis_url, run)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


async def count(redis: Redis, run: str, kind: str) -> int:
    return len(await recorded(redis, run, kind))


async def intended(redis: Redis, run: str, steps: int) -> None:
    """Wait until so many steps are about to run, or ran."""
    async with asyncio.timeout(60):
        while await count(redis, run, "turn_intended") < steps:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.05)


async def test_episodes_outlive_the_service_that_runs_their_steps(
    redis: Redis, redis_url: str, run: str, tmp_path: Path
) -> None:
    registry, addresses, in_steps = Registry(redis, run), set(), 0
    async with (
        service(tmp_path, redis_url, run) as sandbox,
        replica(registry, counting),
        router(redis, run, tmp_path, host_away_s=20.0) as it,
    ):
        await it.stub.SubmitTaskSet(submission(), timeout=5)
        for kill in range(KILLS):
            # A step is intended before it runs, and lasts: the kill falls into it.
            await intended(redis, run, SIBLINGS * (kill + 1))
            addresses |= {entry.address for entry in await registry.list("sandbox")}
            await sandbox.kill()
            finished = await count(redis, run, "turn_finished")
            in_steps += finished < await count(redis, run, "turn_intended")
            await sandbox.start()
        progress = await until(it.stub, complete)
    assert len(addresses) > 1
    assert in_steps == KILLS
    assert (progress.repairs, dict(progress.outcomes)) == (0, {"model_success": SIBLINGS})
    assert await recorded(redis, run, "box_restored") == []
    turns = [x.episode.attempt for x in await recorded(redis, run, "turn_finished")]
    assert turns == [0] * SIBLINGS * (TURNS + 1)
