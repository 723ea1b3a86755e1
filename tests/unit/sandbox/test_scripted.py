"""Made-up boxes: deterministic, varied, and under the order of calls that real ones have."""

from __future__ import annotations

import pytest

from muster.types import Limits
from services.sandbox.adapters.scripted import ScriptedBackend
from services.sandbox.box import BoxFailure, Evidence, JudgeSpec

SPEC = JudgeSpec((), "/tests/test.sh", "/", {}, 1.0, Limits())


async def told(name: str, *commands: str) -> tuple[list[Evidence], bytes]:
    backend = ScriptedBackend()
    await backend.start(name, Limits())
    steps = [await backend.run(name, command, 1.0) for command in commands]
    await backend.seal(name)
    return steps, (await backend.judge(name, SPEC)).files["reward.txt"]


async def test_the_same_commands_give_the_same_answers_in_any_box() -> None:
    assert await told("a", "one", "two") == await told("b", "one", "two")
    assert (await told("a", "one", "two"))[0] != (await told("a", "two", "one"))[0]


async def test_steps_fail_now_and_then_and_verdicts_vary() -> None:
    found = [await told("a", f"echo {n}") for n in range(400)]

    failed = sum(steps[0].exit_code != 0 for steps, _ in found)
    passed = sum(reward == b"1\n" for _, reward in found)
    assert 20 < failed < 70
    assert 150 < passed < 250


async def test_nothing_done_is_never_passed_and_a_set_up_line_always_runs() -> None:
    setups = [f"exec /bin/sh -c 'step {n}'" for n in range(100)]
    steps, reward = await told("a", *setups)

    assert reward == b"0\n"
    assert not any(step.exit_code for step in steps)


async def test_calls_out_of_order_are_failures_of_the_box() -> None:
    backend = ScriptedBackend()
    await backend.start("a", Limits())
    with pytest.raises(BoxFailure, match="exists"):
        await backend.start("a", Limits())
    with pytest.raises(BoxFailure, match="not sealed"):
        await backend.judge("a", SPEC)
    await backend.seal("a")
    with pytest.raises(BoxFailure, match="sealed"):
        await backend.run("a", "true", 1.0)
    assert await backend.end("a")
    assert not await backend.end("a")
    with pytest.raises(BoxFailure, match="no box"):
        await backend.set_session("a", "/", {})
