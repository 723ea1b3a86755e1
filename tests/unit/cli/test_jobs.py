"""`muster submit`, `watch` and `cancel`: which router is meant, what is told, what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from muster.cli import jobs
from muster.cli.jobs import Where, followed, reached
from muster.cli.screen import LineScreen, fell_short, summary
from muster.client import JobState, Progress
from muster.errors import NotFound
from muster.supervise.state import claim, write_router_address
from tests.unit.client.router_double import RouterDouble

RUNNING = Progress(
    job="job-a",
    state=JobState.RUNNING,
    groups_total=4,
    groups_opened=8,
    groups_complete=7,
    groups_trained=2,
    groups_filtered=5,
    episodes_running=1,
    episodes_finished=30,
    turns=90,
    repairs=0,
    outcomes={},
    policy_version=1,
    waiting_for="",
)


def _task(folder: Path, split: str) -> Path:
    task = folder / "a-task"
    for name in ("tests", "environment"):
        (task / name).mkdir(parents=True)
    (task / "instruction.md").write_text("Do it.\n")
    (task / "task.toml").write_text(f'[metadata]\nmuster_split = "{split}"\n')
    (task / "tests" / "test.sh").write_text("true\n")
    (task / "environment" / "Dockerfile").write_text("FROM debian\n")
    return task


@pytest.mark.parametrize("by", ["state_dir", "config"])
async def test_the_router_of_a_state_folder_is_found(tmp_path: Path, by: str) -> None:
    state, config = tmp_path / "state", tmp_path / "my.toml"
    state.mkdir()
    config.write_text(f'state_dir = "{state}"\n')
    where = Where(state_dir=state) if by == "state_dir" else Where(config=config)
    router = RouterDouble()
    async with router.serving() as server:
        write_router_address(state, server.address)
        async with reached(where) as client:
            await client.submit(_task(tmp_path, "train"), groups=1, group_size=2)
    assert len(router.submitted) == 1


async def test_where_nothing_runs_no_other_router_is_asked(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no `muster up` runs with this state folder → start it"):
        async with reached(Where(state_dir=tmp_path)):
            pytest.fail("whoever listens at the usual address is another run's")


async def test_a_router_that_is_starting_is_waited_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    claimed, _ = claim(tmp_path)
    said = ""

    async def ask() -> None:
        async with reached(Where(state_dir=tmp_path)) as client:
            await client.submit(_task(tmp_path, "train"), groups=1, group_size=2)

    router = RouterDouble()
    try:
        async with router.serving() as server, asyncio.TaskGroup() as tasks:
            tasks.create_task(ask(), name="ask")
            while "waiting for the router of" not in said:
                await asyncio.sleep(0.01)
                said += capfd.readouterr().err
            write_router_address(tmp_path, server.address)
    finally:
        claimed.release()
    assert len(router.submitted) == 1


@pytest.mark.parametrize(("split", "noted"), [("eval", True), ("train", False)])
async def test_who_submits_eval_tasks_is_told_that_they_are_trained_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], split: str, noted: bool
) -> None:
    async with RouterDouble().serving() as server:
        await asyncio.to_thread(
            jobs.submit,
            _task(tmp_path, split),
            groups=1,
            group_size=2,
            temperature=1.0,
            wait=False,
            where=Where(server.address),
            as_json=False,
            split=split,
        )
    said = capfd.readouterr()
    assert ("is trained on, of eval tasks too" in said.err) is noted
    assert said.out.startswith("job-"), "the name alone, for scripts"


def test_a_job_in_one_line_counts_what_was_asked_for() -> None:
    assert summary(RUNNING).startswith(
        "job-a running: 2 of 4 groups trained (8 opened, 7 complete, 5 filtered) · episodes 1 "
    )


def test_a_job_that_gave_up_says_why() -> None:
    ended = msgspec.structs.replace(RUNNING, state=JobState.DONE, groups_filtered=6)
    assert fell_short(ended) == (
        "it gave up with 2 of 4 groups trained: of 6 filtered groups 4 were replaced, which is at "
        "most one for each group asked for"
    )


@pytest.mark.parametrize(
    "other",
    [
        RUNNING,
        msgspec.structs.replace(RUNNING, state=JobState.CANCELLED),
        msgspec.structs.replace(RUNNING, state=JobState.DONE, groups_trained=4),
    ],
)
def test_a_job_that_did_not_give_up_has_no_such_reason(other: Progress) -> None:
    assert fell_short(other) == ""


def test_a_filtered_group_is_a_line_in_logs(capsys: pytest.CaptureFixture[str]) -> None:
    shown = LineScreen()
    shown.job(RUNNING)
    shown.job(msgspec.structs.replace(RUNNING, groups_filtered=6))
    assert "6 filtered" in capsys.readouterr().out


async def test_a_watch_without_a_change_says_so_once() -> None:
    told: list[str] = []
    heard = asyncio.Event()

    def tell(line: str) -> None:
        told.append(line)
        heard.set()

    async def states() -> AsyncIterator[Progress]:
        yield RUNNING
        await heard.wait()
        yield msgspec.structs.replace(RUNNING, state=JobState.DONE)

    shown: list[Progress] = []
    last = await followed(states(), shown.append, tell, quiet_s=0.01)
    assert told == ["nothing has changed for 0.01 s"]
    assert (len(shown), last.state) == (2, JobState.DONE)


async def test_a_watch_with_changes_says_nothing() -> None:
    async def states() -> AsyncIterator[Progress]:
        yield RUNNING
        yield msgspec.structs.replace(RUNNING, state=JobState.DONE)

    told: list[str] = []
    await followed(states(), lambda progress: None, told.append, quiet_s=60)
    assert told == []


def test_commands_that_are_named_go_to_the_same_run() -> None:
    where = Where(config=Path("my file.toml"), state_dir=Path("/s"))
    assert where.options == " --config 'my file.toml' --state-dir /s"
    assert Where("127.0.0.1:1").options == ""
