"""How a job's groups are opened: encoded side by side, recorded and answered in order."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from muster.types import EpisodeKey, SamplingParams
from services.router import commands as c
from services.router import events as e
from services.router.config import RouterConfig
from services.router.driver import RouterDriver
from services.router.rules import RouterRules


def opened(index: int) -> c.OpenGroup:
    return c.OpenGroup(f"job-{index}", "job", "task", "digest", 8, 0, SamplingParams())


class World:
    """A driver around a machine that has one job; encoding ends when `encoded[text]` is set."""

    def __init__(self) -> None:
        self.encoding, self.recorded = list[str](), list[str]()
        self.encoded = [asyncio.Event() for _ in range(3)]
        self.fail = False
        tasks = [SimpleNamespace(instruction=f"task {n}") for n in range(3)]
        machine = SimpleNamespace(
            rules=RouterRules(run="main", owner_epoch=1, groups_per_batch=1),
            job=lambda name: SimpleNamespace(spec=SimpleNamespace(tasks=tasks)),
        )
        calls: Any = SimpleNamespace(prompt=self._prompt)
        durable: Any = SimpleNamespace(open_group=self._open_group)
        nothing: Any = None
        driver_of: Any = RouterDriver
        self.driver = driver_of(machine, calls, durable, nothing, nothing, RouterConfig())

    async def _prompt(self, messages: Any) -> tuple[int, tuple[int, ...]]:
        at = next(n for n in range(3) if f"task {n}" in str(messages))
        self.encoding.append(f"job-{at}")
        await self.encoded[at].wait()
        return at, ()

    async def _open_group(self, command: c.OpenGroup, key: EpisodeKey) -> None:
        del key
        if self.fail:
            raise RuntimeError("no")
        self.recorded.append(command.group)


async def test_openings_are_encoded_side_by_side_and_answered_in_order() -> None:
    world, answered = World(), list[str]()

    async def execute(index: int) -> None:
        event = await world.driver._execute(opened(index))
        assert isinstance(event, e.GroupRecorded)
        answered.append(event.group)

    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        for index in range(3):
            tasks.create_task(execute(index))
        while len(world.encoding) < 3:  # noqa: ASYNC110 - none has ended
            await asyncio.sleep(0)
        assert world.recorded == ["job-0"], "the next record waits for the answer before it"
        world.encoded[2].set()
        world.encoded[1].set()
        await asyncio.sleep(0)
        assert answered == []
        world.encoded[0].set()
    assert answered == world.recorded == ["job-0", "job-1", "job-2"]
    assert sorted(world.encoding) == answered, "each is encoded once"


async def test_a_record_that_fails_leaves_no_encoding_behind() -> None:
    world = World()
    world.fail = True
    with pytest.raises(ExceptionGroup, match="unhandled"):
        await world.driver._execute(opened(0))
    await asyncio.sleep(0)
    assert [t.get_name() for t in asyncio.all_tasks() if t.get_name().startswith("open-")] == []
