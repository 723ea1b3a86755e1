"""What every backend promises, told on the fake and on real boxes with the same commands."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from muster.types import Limits
from services.sandbox.adapters.fake import open_fake
from services.sandbox.adapters.native.backend import open_native
from services.sandbox.box import Backend, BoxFailure, Evidence, JudgeSpec, PutFile

ENV = {"PATH": "/usr/bin:/bin", "HOME": "/root"}
NATIVE = pytest.param(
    "native",
    marks=[
        pytest.mark.root,
        pytest.mark.skipif(os.geteuid() != 0, reason="native boxes need root"),
    ],
)


@pytest.fixture(params=["fake", NATIVE])
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Backend]:
    opened = open_fake() if request.param == "fake" else open_native(tmp_path / "run")
    async with opened as made:
        yield made


@pytest.fixture
async def box(backend: Backend) -> str:
    await backend.start("a", Limits())
    await backend.set_session("a", "/app", dict(ENV))
    return "a"


def output(evidence: Evidence) -> str:
    return (evidence.head + evidence.tail).decode()


def spec(script: str, *, timeout_s: float = 20.0) -> JudgeSpec:
    test = PutFile("/tests/test.sh", 0o755, script.encode())
    return JudgeSpec((test,), "/tests/test.sh", "/app", dict(ENV), timeout_s, Limits())


async def test_a_step_answers_with_exit_code_and_output(backend: Backend, box: str) -> None:
    found = await backend.run(box, "echo hello; exit 3", 10)
    assert (found.exit_code, output(found), found.total) == (3, "hello\n", 6)
    assert not found.timed_out
    assert not found.broken


async def test_a_step_starts_in_the_folder_and_environment_it_was_given(
    backend: Backend, box: str
) -> None:
    await backend.set_session(box, "/app", ENV | {"COLOUR": "green"})
    assert output(await backend.run(box, "pwd; echo $COLOUR", 10)) == "/app\ngreen\n"


async def test_folder_and_exported_variables_are_carried_to_the_next_step(
    backend: Backend, box: str
) -> None:
    await backend.run(box, "cd /tmp; export COLOUR=blue; exit 1", 10)
    assert output(await backend.run(box, "pwd; echo $COLOUR", 10)) == "/tmp\nblue\n"


async def test_files_stay_between_steps(backend: Backend, box: str) -> None:
    await backend.run(box, "echo one > kept.txt", 10)
    await backend.run(box, "echo two >> kept.txt", 10)
    assert output(await backend.run(box, "cat /app/kept.txt", 10)) == "one\ntwo\n"


async def test_files_can_be_put_into_a_box(backend: Backend, box: str) -> None:
    await backend.put(box, (PutFile("/data/deep/in.txt", 0o644, b"given\n"),))
    assert output(await backend.run(box, "cat /data/deep/in.txt", 10)) == "given\n"


async def test_output_is_cut_in_the_middle_and_counted(backend: Backend) -> None:
    await backend.start("small", Limits(output_bytes=8))
    found = await backend.run("small", "printf 0123456789abcdef", 10)
    assert (found.head, found.tail, found.total) == (b"0123", b"cdef", 16)


async def test_the_time_limit_ends_a_step_and_keeps_output_and_session(
    backend: Backend, box: str
) -> None:
    await backend.run(box, "export COLOUR=blue", 10)
    found = await backend.run(box, "echo began; export COLOUR=red; sleep 60", 0.3)
    assert (found.timed_out, output(found), found.signal) == (True, "began\n", 9)
    after = await backend.run(box, "echo $COLOUR", 10)
    assert (after.exit_code, output(after)) == (0, "blue\n")


async def test_boxes_do_not_see_each_other(backend: Backend, box: str) -> None:
    await backend.run(box, "echo secret > /tmp/mine", 10)
    await backend.start("b", Limits())
    await backend.set_session("b", "/", dict(ENV))
    assert (await backend.run("b", "cat /tmp/mine", 10)).exit_code == 1


async def test_a_verifier_judges_what_the_agent_left(backend: Backend, box: str) -> None:
    await backend.run(box, "echo 42 > answer.txt", 10)
    await backend.seal(box)
    judged = await backend.judge(box, spec("cat answer.txt > /logs/verifier/reward.txt"))
    assert judged.files == {"reward.txt": b"42\n"}


async def test_a_verifier_runs_again_from_the_same_sealed_files(backend: Backend, box: str) -> None:
    await backend.run(box, "echo 1 > answer.txt", 10)
    await backend.seal(box)
    script = "cat answer.txt > /logs/verifier/reward.txt; echo 0 > answer.txt"
    first = await backend.judge(box, spec(script))
    second = await backend.judge(box, spec(script))
    assert first.files == second.files == {"reward.txt": b"1\n"}


async def test_a_planted_verdict_is_not_there_for_the_verifier(backend: Backend, box: str) -> None:
    await backend.put(box, (PutFile("/logs/verifier/reward.txt", 0o644, b"1"),))
    await backend.seal(box)
    judged = await backend.judge(box, spec("exit 0"))
    assert judged.files == {}


async def test_a_verifier_that_hangs_is_ended_at_its_limit(backend: Backend, box: str) -> None:
    await backend.seal(box)
    judged = await backend.judge(box, spec("echo said; sleep 60", timeout_s=0.3))
    assert judged.evidence.timed_out
    assert output(judged.evidence) == "said\n"


async def test_no_step_runs_in_a_sealed_box(backend: Backend, box: str) -> None:
    await backend.seal(box)
    with pytest.raises(BoxFailure):
        await backend.run(box, "echo still", 10)


async def test_an_unsealed_box_is_not_judged(backend: Backend, box: str) -> None:
    with pytest.raises(BoxFailure, match="not sealed"):
        await backend.judge(box, spec("exit 0"))


async def test_a_name_is_used_once(backend: Backend, box: str) -> None:
    with pytest.raises(BoxFailure):
        await backend.start(box, Limits())


async def test_ending_is_told_once(backend: Backend, box: str) -> None:
    assert await backend.end(box) is True
    assert await backend.end(box) is False
    with pytest.raises(BoxFailure):
        await backend.set_session(box, "/", {})
    with pytest.raises(BoxFailure):
        await backend.run(box, "echo still", 10)
