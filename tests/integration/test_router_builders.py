"""A task whose Dockerfile only an image builder can read, at the front door."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from redis.asyncio import Redis

from muster import rpc
from muster.archive import TaskFile, pack_files
from muster.box_offer import Offer
from muster.errors import InvalidInput
from muster.registry import Registry
from muster.types import Limits
from muster.v1 import common_pb2 as pb
from muster.v1 import router_pb2 as rt
from tests.integration.router_world import BoxHost, fleet, router

TEXTS = {
    "instruction.md": "Build it.",
    "environment/Dockerfile": "FROM scratch\nARG VERSION=1\nRUN echo $VERSION > made\n",
    "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
}


def submission(**changes: str) -> rt.SubmitTaskSetRequest:
    texts = TEXTS | {name.replace("_", "/"): text for name, text in changes.items()}
    archive = pack_files({path: TaskFile(0o644, text.encode()) for path, text in texts.items()})
    digest = hashlib.sha256(archive).hexdigest()
    task = pb.TaskPackage(name="built", digest=digest, archive=archive)
    sampling = pb.SamplingParams(temperature=1.0, top_p=1.0)
    return rt.SubmitTaskSetRequest(
        job="job", tasks=[task], groups=1, group_size=2, sampling=sampling
    )


async def test_it_is_refused_where_no_host_builds_and_nothing_is_kept(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    async with fleet(redis, run), router(redis, run, tmp_path) as it:
        with pytest.raises(InvalidInput) as caught, rpc.calling("submit"):
            await it.stub.SubmitTaskSet(submission(), timeout=5)
        assert it.driver._machine.job("job") is None
    assert (caught.value.field, caught.value.value) == ("environment/Dockerfile line 2", "built")
    assert "ARG" in caught.value.problem


async def test_an_image_that_no_host_announces_is_refused_and_nothing_is_kept(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    host = Offer(bases=("debian:*",), most=Limits()).info()
    async with (
        Registry(redis, run).announce("sandbox", "h9", "127.0.0.1:1", host),
        router(redis, run, tmp_path) as it,
    ):
        unknown = submission(environment_Dockerfile="FROM nixos/nix:2\n")
        with pytest.raises(InvalidInput) as caught, rpc.calling("submit"):
            await it.stub.SubmitTaskSet(unknown, timeout=5)
        assert it.driver._machine.job("job") is None
        known = submission(environment_Dockerfile="FROM debian:12\n")
        assert (await it.stub.SubmitTaskSet(known, timeout=5)).job == "job"
    assert caught.value.field == "environment/Dockerfile FROM"
    assert "known are: debian:*" in caught.value.problem


async def test_before_any_host_is_announced_a_task_is_taken(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    async with router(redis, run, tmp_path) as it:
        unknown = submission(environment_Dockerfile="FROM nixos/nix:2\n")
        assert (await it.stub.SubmitTaskSet(unknown, timeout=5)).job == "job"


async def test_it_is_taken_once_a_host_says_that_it_builds(
    redis: Redis, run: str, tmp_path: Path
) -> None:
    async with (
        fleet(redis, run, hosts=[BoxHost("native")]),
        Registry(redis, run).announce("sandbox", "h9", "127.0.0.1:1", {"builds": "dockerfile"}),
        router(redis, run, tmp_path) as it,
    ):
        taken = await it.stub.SubmitTaskSet(submission(), timeout=5)
    assert taken.job == "job"
