"""Equal seeds give equal traces in any process: whatever the interpreter hashes names to."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from msgspec.structs import replace
from sim.rollout.arms import ARMS
from sim.rollout.baselines import BASELINES
from sim.rollout.muster import World
from sim.rollout.workload import TB_LIKE
regime = replace(TB_LIKE, groups=2, group_size=3, replicas=3, boxes=12, kv_tokens=280_000,
                 start_failure=0.05, hazard_per_s=1 / 1_000)
arm = sys.argv[1]
if arm in BASELINES:
    loop = BASELINES[arm](regime, 104, 2, trace=True)
    print(loop.run(), loop.heap.trace)
else:
    world = World(ARMS[arm], regime, 104, 2, trace=True)
    world.run()
    print(world.figures(), world.heap.trace)
"""


def begun(arm: str, seed: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", PROGRAM, arm]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("arm", ["muster", "sticky least-loaded", "async-strong", "hold-resume"])
def test_a_run_is_the_same_in_every_process(arm: str) -> None:
    told = []
    for process in [begun(arm, seed) for seed in ("1", "7")]:
        with process:
            told.append(process.communicate()[0])
    assert len(told[0]) > 64
    assert told[0] == told[1]
