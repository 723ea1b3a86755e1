"""The sandbox host's calls, told on the fake and on real boxes: once-only, fencing, bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from muster.errors import (
    Exhausted,
    InvalidInput,
    MusterError,
    NotFound,
    Refused,
    Unavailable,
)
from muster.types import Limits, StepLimit, VerdictStatus
from services.sandbox.adapters.fake import open_fake
from services.sandbox.box import Backend
from services.sandbox.config import SandboxConfig
from services.sandbox.driver import SandboxHost
from tests.contract import backends
from tests.contract.hosts import DOCKERFILE, KEY, acquire, key, package, step

PLAIN = SandboxConfig(warm_max=0)


@pytest.fixture(params=backends.ALL)
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Backend]:
    async with backends.opened(request, tmp_path / "run") as made:
        yield made


@pytest.fixture
async def host(backend: Backend) -> AsyncIterator[SandboxHost]:
    config = SandboxConfig(boxes_max=2, starting_max=1, waiting_max=2, steps_max=20, warm_max=0)
    async with SandboxHost(backend, config, "host") as made:
        yield made


async def test_a_box_starts_with_the_task_s_files_folder_and_variables(host: SandboxHost) -> None:
    got = await acquire(host)
    assert got.workdir == "/job"
    told = await step(host, got.box, 0, "pwd; echo $COLOUR; cat data/given.txt")
    assert told == "/job\ngreen\ngiven\n"


async def test_tests_are_not_in_the_agent_s_box(host: SandboxHost) -> None:
    got = await acquire(host)
    record, _ = await host.execute(KEY, got.box, 0, "test -e /tests/test.sh", 10)
    assert record.evidence.exit_code == 1


async def test_run_lines_prepare_the_box(host: SandboxHost) -> None:
    lines = "RUN echo $COLOUR > made.txt && export COLOUR=red && cd /\nRUN pwd >> made.txt\n"
    got = await acquire(host, dockerfile=DOCKERFILE + lines)
    assert await step(host, got.box, 0, "cat made.txt; echo $COLOUR") == "green\n/job\ngreen\n"


async def test_a_run_line_that_fails_names_the_line_and_leaves_no_box(host: SandboxHost) -> None:
    with pytest.raises(InvalidInput) as caught:
        await acquire(host, dockerfile=DOCKERFILE + "RUN nonsense-here\n")
    assert caught.value.field.startswith("environment/Dockerfile")
    assert caught.value.value == "nonsense-here"
    assert host.boxes == 0
    await acquire(host)


async def test_the_same_attempt_gets_the_same_unused_box(host: SandboxHost) -> None:
    first = await acquire(host)
    assert await acquire(host) == first
    await step(host, first.box, 0, "true")
    with pytest.raises(Refused):
        await acquire(host)


async def test_an_attempt_with_a_box_gets_none_of_another_task_unless_it_is_fresh(
    host: SandboxHost,
) -> None:
    """It would work in one task's folder, and be judged by the tests of the other."""
    first = await acquire(host)
    with pytest.raises(Refused, match="another task"):
        await acquire(host, test="exit 0")
    second = await acquire(host, test="exit 0", fresh=True)
    assert second.box != first.box


async def test_a_turn_runs_once_and_its_answer_is_kept(host: SandboxHost) -> None:
    box = (await acquire(host)).box
    first = await host.execute(KEY, box, 0, "echo more >> /job/log; cat /job/log", 10)
    again = await host.execute(KEY, box, 0, "echo more >> /job/log; cat /job/log", 10)
    assert (first[1], again[1]) == (False, True)
    assert first[0] == again[0]
    assert await step(host, box, 1, "cat /job/log") == "more\n"


async def test_two_calls_at_once_for_one_turn_run_it_once(host: SandboxHost) -> None:
    box = (await acquire(host)).box
    async with asyncio.TaskGroup() as tasks:
        calls = [
            tasks.create_task(host.execute(KEY, box, 0, "echo x >> /job/log", 10)) for _ in range(3)
        ]
    assert sorted(call.result()[1] for call in calls) == [False, True, True]
    assert await step(host, box, 1, "cat /job/log") == "x\n"


async def test_a_caller_that_leaves_does_not_stop_its_step(host: SandboxHost) -> None:
    box = (await acquire(host)).box
    command = "echo once >> /job/log; sleep 0.2; cat /job/log"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await host.execute(KEY, box, 0, command, 10)
    record, repeated = await host.execute(KEY, box, 0, command, 10)
    assert (record.evidence.head, repeated) == (b"once\n", True)


async def test_a_turn_is_not_given_another_command(host: SandboxHost) -> None:
    box = (await acquire(host)).box
    await step(host, box, 0, "echo one")
    with pytest.raises(Refused, match="another command"):
        await step(host, box, 0, "echo two")


async def test_an_older_turn_that_never_ran_is_refused(host: SandboxHost) -> None:
    box = (await acquire(host)).box
    await step(host, box, 3, "echo three")
    with pytest.raises(Refused) as caught:
        await step(host, box, 2, "echo two")
    assert caught.value.field == "turn"


async def test_the_time_limit_is_named_and_the_session_goes_on(host: SandboxHost) -> None:
    box = (await acquire(host)).box
    record, _ = await host.execute(KEY, box, 0, "sleep 60", 0.3)
    assert record.limit is StepLimit.TIME
    assert await step(host, box, 1, "pwd") == "/job\n"


async def test_a_verdict_is_given_and_can_be_asked_for_again(host: SandboxHost) -> None:
    box = (await acquire(host)).box
    await step(host, box, 0, "echo 0.5 > answer.txt")
    for _ in range(2):
        done = await host.verify(KEY, box)
        assert (done.verdict.status, done.verdict.reward) == (VerdictStatus.REWARDED, 0.5)


async def test_a_verifier_that_leaves_nothing_gives_no_reward(host: SandboxHost) -> None:
    box = (await acquire(host)).box
    done = await host.verify(KEY, box)
    assert done.verdict.status is VerdictStatus.INVALID
    assert done.evidence.exit_code == 1


async def test_a_verifier_that_hangs_is_a_timeout(host: SandboxHost) -> None:
    toml = "[verifier]\ntimeout_sec = 0.3\n"
    box = (await acquire(host, test="sleep 60", toml=toml)).box
    assert (await host.verify(KEY, box)).verdict.status is VerdictStatus.TIMEOUT


async def test_after_verification_no_step_runs(host: SandboxHost) -> None:
    box = (await acquire(host)).box
    await host.verify(KEY, box)
    with pytest.raises(Refused, match="sealed"):
        await step(host, box, 0, "echo more")


async def test_release_ends_the_box_and_is_told_once(host: SandboxHost) -> None:
    box = (await acquire(host)).box
    assert await host.release(KEY, box) is True
    assert await host.release(KEY, box) is False
    with pytest.raises(NotFound):
        await step(host, box, 0, "echo x")


async def test_a_box_answers_to_its_own_attempt_only(host: SandboxHost) -> None:
    box = (await acquire(host)).box
    with pytest.raises(NotFound):
        await host.execute(key(attempt=2), box, 0, "echo x", 10)


async def test_callers_wait_for_a_free_box(host: SandboxHost) -> None:
    boxes = [await acquire(host, key(sibling=n)) for n in range(2)]
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(acquire(host, key(sibling=2)))
        await asyncio.sleep(0)
        assert not waiting.done()
        await host.release(key(sibling=0), boxes[0].box)
        assert (await waiting).box not in {b.box for b in boxes}


async def test_no_caller_waits_past_its_deadline(host: SandboxHost) -> None:
    for number in range(2):
        await acquire(host, key(sibling=number))
    with pytest.raises(Exhausted) as caught:
        await host.acquire(key(sibling=2), **package() | {"wait_s": 0.1})
    assert caught.value.field == "sandbox.boxes_max"


async def test_who_has_waited_in_earlier_calls_is_served_before_who_came_first(
    host: SandboxHost,
) -> None:
    boxes = [await acquire(host, key(sibling=n)) for n in range(2)]
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(acquire(host, key(sibling=2)))
        await asyncio.sleep(0)
        again = tasks.create_task(host.acquire(key(sibling=3), **package(), waited_s=90.0))
        await asyncio.sleep(0)
        await host.release(key(sibling=0), boxes[0].box)
        box = (await again).box
        assert not first.done()
        await host.release(key(sibling=3), box)
        await first


async def test_a_caller_that_leaves_the_queue_takes_no_box(host: SandboxHost) -> None:
    boxes = [await acquire(host, key(sibling=n)) for n in range(2)]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await acquire(host, key(sibling=2))
    await host.release(key(sibling=0), boxes[0].box)
    await acquire(host, key(sibling=3))
    assert host.boxes == 2


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"digest": "00"}, "task.digest"),
        ({"asked": Limits(memory_bytes=1 << 50)}, "limits.memory_bytes"),
        ({"asked": Limits(pids=-1)}, "limits.pids"),
        ({"waited_s": -1.0}, "waited_s"),
        ({"waited_s": float("nan")}, "waited_s"),
    ],
)
async def test_a_wrong_request_names_its_field(
    changes: dict[str, Any], field: str, host: SandboxHost
) -> None:
    with pytest.raises(MusterError) as caught:
        await host.acquire(KEY, **package() | changes)
    assert caught.value.field == field
    assert caught.value.way_out


@pytest.mark.parametrize(
    ("command", "limit_s", "field"),
    [("echo", 0.0, "timeout_s"), ("echo", 1e9, "timeout_s"), ("x" * 70000, 1.0, "command")],
)
async def test_a_step_out_of_bounds_is_refused_and_uses_no_turn(
    command: str, limit_s: float, field: str, host: SandboxHost
) -> None:
    box = (await acquire(host)).box
    with pytest.raises(InvalidInput) as caught:
        await host.execute(KEY, box, 0, command, limit_s)
    assert caught.value.field == field
    assert await step(host, box, 0, "echo on") == "on\n"


async def test_steps_of_a_box_are_bounded(host: SandboxHost) -> None:
    box = (await acquire(host)).box
    for turn in range(20):
        await step(host, box, turn, "true")
    with pytest.raises(Exhausted):
        await step(host, box, 20, "true")


async def test_a_step_lost_by_the_host_is_no_result_and_its_box_is_gone() -> None:
    async with open_fake() as backend, SandboxHost(backend, PLAIN, "host") as host:
        box = (await acquire(host)).box
        backend.fail_steps = 1
        for turn in (0, 0, 1):  # the repeat of the call does not run it again
            with pytest.raises(NotFound) as caught:
                await host.execute(KEY, box, turn, "echo one", 10)
            assert caught.value.field == "box"
        assert await step(host, (await acquire(host)).box, 0, "echo one") == "one\n"
        assert len(backend.running) == 1


async def test_a_verification_lost_by_the_host_is_no_verdict_and_can_be_asked_again() -> None:
    async with open_fake() as backend, SandboxHost(backend, PLAIN, "host") as host:
        box = (await acquire(host, test="echo 1 > /logs/verifier/reward.txt")).box
        backend.fail_steps = 1
        with pytest.raises(Unavailable, match="could not judge"):
            await host.verify(KEY, box)
        assert (await host.verify(KEY, box)).verdict.reward == 1.0


async def test_a_run_line_that_breaks_its_box_is_the_author_s_mistake() -> None:
    async with open_fake() as backend, SandboxHost(backend, PLAIN, "host") as host:
        with pytest.raises(InvalidInput) as caught:
            await acquire(host, dockerfile=DOCKERFILE + "RUN kill-box\n")
        assert caught.value.field.startswith("environment/Dockerfile")


async def test_a_stopping_host_answers_every_caller_at_once(backend: Backend) -> None:
    config = SandboxConfig(boxes_max=2, warm_max=0)
    async with asyncio.timeout(10), SandboxHost(backend, config, "host") as host:
        box = (await acquire(host)).box
        await acquire(host, key(sibling=1))

        async def told(call: Any) -> None:
            with pytest.raises(Unavailable):
                await call

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(told(host.execute(KEY, box, 0, "sleep 60; sleep 60", 60)))
            tasks.create_task(told(acquire(host, key(sibling=2))))
            await asyncio.sleep(0)
            host.stop()
        for call in (acquire(host), host.execute(KEY, box, 1, "true", 10), host.release(KEY, box)):
            await told(call)


async def test_a_task_s_own_limits_hold_where_the_job_sets_none(backend: Backend) -> None:
    toml = "[environment]\nmemory_mb = 8192\n"
    async with SandboxHost(backend, PLAIN, "host") as host:
        with pytest.raises(InvalidInput) as caught:
            await acquire(host, toml=toml)
        assert caught.value.field == "environment.memory_mb"
        assert "sandbox.memory_bytes_max" in caught.value.way_out
        # A job that says a figure itself overrides the task's.
        asked = {"asked": Limits(64 << 20, 0, 0, 0, 0)}
        await host.acquire(KEY, **package(toml=toml) | asked)


async def test_a_box_that_does_not_end_at_once_is_ended_again() -> None:
    async with open_fake() as backend, SandboxHost(backend, PLAIN, "host") as host:
        box = (await acquire(host)).box
        backend.fail_ends = 2
        assert await host.release(KEY, box)
        assert backend.running == []


async def test_what_cannot_be_had_here_is_counted_as_the_tasks(host: SandboxHost) -> None:
    with pytest.raises(InvalidInput):
        await acquire(host, toml="[environment]\nmemory_mb = 999999\n")
    assert dict(host.status().counts.failures) == {"task": 1}
