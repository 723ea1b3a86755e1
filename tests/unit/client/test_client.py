"""The client against a scripted router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from muster.client import JobState, MusterClient, Progress
from muster.errors import InvalidInput, NotFound, Unavailable
from muster.v1 import router_pb2 as pb
from tests.unit.client.router_double import RouterDouble, progress


@pytest.fixture
def task(tmp_path: Path) -> Path:
    folder = tmp_path / "write-word"
    (folder / "tests").mkdir(parents=True)
    (folder / "environment").mkdir()
    (folder / "instruction.md").write_text("Write a word.\n")
    (folder / "task.toml").write_text("")
    (folder / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    (folder / "environment" / "Dockerfile").write_text("FROM debian\nWORKDIR /app\n")
    return folder


async def test_a_submission_carries_the_packed_task_and_its_numbers(task: Path) -> None:
    router = RouterDouble()
    async with router.serving() as server, MusterClient(server.address) as client:
        job = await client.submit(task, groups=3, group_size=2)
    [sent] = router.submitted
    assert (sent.job, sent.groups, sent.group_size) == (job, 3, 2)
    assert sent.sampling.temperature == 1.0
    assert [package.name for package in sent.tasks] == ["write-word"]
    assert len(sent.tasks[0].digest) == 64


async def test_a_submission_is_repeated_under_the_same_name(task: Path) -> None:
    router = RouterDouble(refusals=1)
    async with router.serving() as server, MusterClient(server.address) as client:
        await client.submit(task, groups=1, group_size=2)
    first, second = router.submitted
    assert first.job == second.job


async def test_a_group_of_one_is_refused_before_anything_is_sent(task: Path) -> None:
    async with MusterClient("127.0.0.1:1") as client:
        with pytest.raises(InvalidInput, match=r"group_size = '1': must be at least 2 → use 2"):
            await client.submit(task, groups=1, group_size=1)


async def test_a_watch_ends_with_the_job() -> None:
    watches = [[progress(0), progress(2, pb.JOB_STATE_DONE)]]
    router = RouterDouble(watches)
    async with router.serving() as server, MusterClient(server.address) as client:
        seen = [found async for found in client.watch("job-a")]
    assert [found.groups_trained for found in seen] == [0, 2]
    assert seen[-1].state is JobState.DONE
    assert seen[-1].outcomes == {"infra_failure": 2, "model_success": 1}


async def test_a_watch_goes_on_after_a_break_and_says_nothing_twice() -> None:
    watches = [[progress(0), progress(1)], [progress(1), progress(2, pb.JOB_STATE_DONE)]]
    router = RouterDouble(watches)
    async with router.serving() as server, MusterClient(server.address) as client:
        seen = [found.groups_trained async for found in client.watch("job-a")]
    assert seen == [0, 1, 2]


async def test_a_router_that_stays_away_is_named_with_the_way_out() -> None:
    async with MusterClient("127.0.0.1:1", patience_s=0.0) as client:
        with pytest.raises(Unavailable, match=r"router = '127.0.0.1:1': .* → start it with"):
            _ = [found async for found in client.watch("job-a")]


async def test_an_error_of_the_router_arrives_as_it_was_raised() -> None:
    async with RouterDouble().serving() as server, MusterClient(server.address) as client:
        with pytest.raises(NotFound, match=r"job = 'x': no such job → see the list"):
            await client.get("x")


async def test_a_cancelled_job_has_ended() -> None:
    async with RouterDouble().serving() as server, MusterClient(server.address) as client:
        found = await client.cancel("job-a")
    assert found.state is JobState.CANCELLED
    assert found.ended


async def test_of_several_addresses_the_one_that_answers_is_used(task: Path) -> None:
    router = RouterDouble()
    async with router.serving() as server:
        async with MusterClient(f"127.0.0.1:1, {server.address}") as client:
            await client.submit(task, groups=1, group_size=2)
    assert len(router.submitted) == 1


async def test_a_submission_follows_the_router_to_where_it_listens_now(task: Path) -> None:
    router = RouterDouble()
    places = iter(["127.0.0.1:1"])
    async with router.serving() as server:
        async with MusterClient(find=lambda: next(places, server.address)) as client:
            await client.submit(task, groups=1, group_size=2)
    assert len(router.submitted) == 1


async def test_a_stale_place_does_not_hide_the_address(task: Path) -> None:
    """A killed supervisor leaves its note behind."""
    router = RouterDouble()
    async with router.serving() as server:
        async with MusterClient(server.address, find=lambda: "127.0.0.1:1") as client:
            await client.submit(task, groups=1, group_size=2)
    assert len(router.submitted) == 1


async def test_a_router_that_was_fenced_is_left_for_the_one_in_charge(task: Path) -> None:
    former, present = RouterDouble(fenced=True), RouterDouble()
    async with former.serving() as old, present.serving() as new:
        async with MusterClient(f"{old.address},{new.address}") as client:
            await client.submit(task, groups=1, group_size=2)
    assert [sent.job for sent in former.submitted] == [sent.job for sent in present.submitted]


async def test_a_watch_goes_on_at_the_router_that_took_over() -> None:
    former = RouterDouble([[progress(0), progress(1)], []])
    present = RouterDouble([[progress(1), progress(2, pb.JOB_STATE_DONE)]])
    async with former.serving() as old, present.serving() as new:
        places = iter([old.address])
        async with MusterClient(find=lambda: next(places, new.address)) as client:
            seen = [found.groups_trained async for found in client.watch("job-a")]
    assert seen == [0, 1, 2]


async def test_a_watch_outlives_another_calls_move_to_the_router_in_charge(task: Path) -> None:
    """The move closes the connection that both calls use."""
    former = RouterDouble([[progress(0)]], fenced=True)
    former.hold.clear()
    present = RouterDouble([[progress(2, pb.JOB_STATE_DONE)]])
    async with former.serving() as old, present.serving() as new:
        async with MusterClient(f"{old.address},{new.address}") as client:
            watching = client.watch("job-a")
            first = await anext(watching)
            async with asyncio.TaskGroup() as tasks:
                rest = tasks.create_task(_all(watching))
                await client.submit(task, groups=1, group_size=2)
    seen = [first, *rest.result()]
    assert [found.groups_trained for found in seen] == [0, 2]


async def _all(watching: AsyncIterator[Progress]) -> list[Progress]:
    return [found async for found in watching]


async def test_a_question_is_repeated_while_the_router_is_away() -> None:
    async with RouterDouble().serving() as server:
        async with MusterClient(f"127.0.0.1:1,{server.address}") as client:
            assert (await client.cancel("job-a")).state is JobState.CANCELLED


@pytest.mark.parametrize("wrong", ["nonsense", "127.0.0.1:99999"])
async def test_each_of_several_addresses_is_checked(wrong: str) -> None:
    with pytest.raises(InvalidInput, match=f"router = '{wrong}'"):
        MusterClient(f"127.0.0.1:1,{wrong}")


async def test_a_found_router_that_is_away_is_not_mistaken_for_the_usual_place() -> None:
    """Somebody else's run may listen there."""
    client = MusterClient(find=lambda: "127.0.0.1:1", patience_s=0.0)
    async with client:
        with pytest.raises(Unavailable) as failed:
            await client.get("j")
    assert failed.value.value == "127.0.0.1:1"
