"""The calls of a sandbox host that no router makes: forks, copies, capacity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from muster import codec, rpc
from muster.taskset import read_task
from muster.types import EpisodeKey
from muster.v1 import common_pb2 as common
from muster.v1 import sandbox_pb2 as sbx
from muster.v1.sandbox_pb2_grpc import SandboxServiceStub

WAIT_S = 60.0


async def forked_text(address: str, folder: Path) -> str:
    """What a fork reads of a file that was copied into the box it comes from; all is given back."""
    task = read_task(folder)
    package = common.TaskPackage(name=task.name, digest=task.digest, archive=task.archive)
    first, second = (codec.key_to_pb(EpisodeKey("aside", "g-0", n, 0, 1)) for n in range(2))
    async with rpc.channel(address) as channel:
        host: Any = SandboxServiceStub(channel)
        asking = sbx.AcquireBoxRequest(episode=first, task=package)
        box = (await host.AcquireBox(asking, timeout=WAIT_S)).box
        await host.Exec(_step(first, box, 0, "echo carried > /tmp/note"), timeout=WAIT_S)
        copying = sbx.CopyOutRequest(episode=first, box=box, path="/tmp/note")
        archive = (await host.CopyOut(copying, timeout=WAIT_S)).archive
        putting = sbx.CopyInRequest(episode=first, box=box, folder="/srv/in", archive=archive)
        await host.CopyIn(putting, timeout=WAIT_S)
        forking = sbx.ForkBoxRequest(episode=first, box=box, after_turn=0, into=second)
        fork = (await host.ForkBox(forking, timeout=WAIT_S)).box
        told = await host.Exec(_step(second, fork, 1, "cat /srv/in/note"), timeout=WAIT_S)
        for episode, name in ((first, box), (second, fork)):
            releasing = sbx.ReleaseBoxRequest(episode=episode, box=name)
            await host.ReleaseBox(releasing, timeout=WAIT_S)
        most = (await host.GetHostStatus(sbx.GetHostStatusRequest(), timeout=WAIT_S)).capacity
        same = sbx.SetCapacityRequest(boxes_max=most.boxes_max, warm_max=most.warm_max)
        await host.SetCapacity(same, timeout=WAIT_S)
    return str(told.output_head.decode())


def _step(episode: common.EpisodeKey, box: str, turn: int, command: str) -> sbx.ExecRequest:
    return sbx.ExecRequest(episode=episode, box=box, turn=turn, command=command, timeout_s=30)
