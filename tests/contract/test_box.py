"""What every backend promises, told on the fake and on real boxes with the same commands."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from muster.types import Limits
from services.sandbox.box import Backend, BoxFailure, Evidence, JudgeSpec, PutFile, Source
from tests.contract import backends

ENV = {"PATH": "/usr/bin:/bin", "HOME": "/root"}


@pytest.fixture(params=backends.ALL)
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Backend]:
    async with backends.opened(request, tmp_path / "run") as made:
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


async def said(backend: Backend, box: str, command: str) -> str:
    return output(await backend.run(box, command, 10))


async def test_a_box_that_stands_ready_is_alive_and_an_ended_one_is_not(
    backend: Backend, box: str
) -> None:
    assert await backend.alive(box) is True
    await backend.run(box, "exit 1", 10)
    assert await backend.alive(box) is True
    await backend.end(box)
    assert await backend.alive(box) is False


async def test_a_sealed_box_is_not_alive(backend: Backend, box: str) -> None:
    await backend.seal(box)
    assert await backend.alive(box) is False


async def test_a_snapshot_that_is_not_kept_running_ends_its_box_and_tells_its_session(
    backend: Backend, box: str
) -> None:
    await backend.run(box, "echo 12345 > made; cd /tmp; export COLOUR=blue", 10)
    found = await backend.snapshot(box, "L-a", keep=False)
    assert (found.depth, found.cwd, found.env["COLOUR"]) == (1, "/tmp", "blue")
    assert found.size > 0
    assert await backend.alive(box) is False
    assert await backend.end(box) is False


async def test_boxes_from_one_snapshot_see_its_files_and_nothing_of_each_other(
    backend: Backend, box: str
) -> None:
    await backend.run(box, "echo before > /app/file", 10)
    await backend.snapshot(box, "L-a", keep=False)
    for name in ("b", "c"):
        await backend.start(name, Limits(), Source(layer="L-a"))
        await backend.set_session(name, "/app", dict(ENV))
    await backend.run("b", "echo mine > file; echo mine > other", 10)
    assert await said(backend, "b", "cat file") == "mine\n"
    assert await said(backend, "c", "cat file") == "before\n"
    assert (await backend.run("c", "cat other", 10)).exit_code == 1
    await backend.start("d", Limits(), Source(layer="L-a"))  # the snapshot is as it was
    assert await said(backend, "d", "cat /app/file") == "before\n"


async def test_a_box_that_is_kept_goes_on_and_its_snapshot_stays_as_it_was(
    backend: Backend, box: str
) -> None:
    await backend.run(box, "echo before > /app/file; export COLOUR=blue", 10)
    found = await backend.snapshot(box, "L-a", keep=True)
    assert (found.depth, found.cwd, found.env["COLOUR"]) == (1, "/app", "blue")
    await backend.run(box, "echo after > file", 10)
    assert await said(backend, box, "cat file; echo $COLOUR") == "after\nblue\n"
    await backend.start("b", Limits(), Source(layer="L-a"))
    assert await said(backend, "b", "cat /app/file") == "before\n"


async def test_a_snapshot_of_a_forked_box_holds_both_and_squashes_to_one(
    backend: Backend, box: str
) -> None:
    await backend.run(box, "echo one > /app/one; echo one > /app/both", 10)
    await backend.snapshot(box, "L-a", keep=False)
    await backend.start("b", Limits(), Source(layer="L-a"))
    await backend.run("b", "echo two > /app/two; echo two > /app/both", 10)
    assert (await backend.snapshot("b", "L-b", keep=True)).depth == 2
    assert (await backend.squash("L-b", "L-c")).depth == 1
    for number, layer in enumerate(("L-b", "L-c")):
        await backend.start(f"f{number}", Limits(), Source(layer=layer))
        found = await said(backend, f"f{number}", "cat /app/one /app/two /app/both")
        assert found == "one\ntwo\ntwo\n"


async def test_a_snapshot_in_use_is_not_dropped_and_an_unused_one_once(
    backend: Backend, box: str
) -> None:
    await backend.snapshot(box, "L-a", keep=False)
    await backend.start("b", Limits(), Source(layer="L-a"))
    with pytest.raises(BoxFailure, match="L-a"):  # by a box
        await backend.drop("L-a")
    await backend.snapshot("b", "L-b", keep=False)
    with pytest.raises(BoxFailure, match="L-a"):  # by a snapshot on top of it
        await backend.drop("L-a")
    assert await backend.drop("L-b") is True
    assert await backend.drop("L-a") is True
    assert await backend.drop("L-a") is False
    with pytest.raises(BoxFailure, match="L-a"):
        await backend.start("c", Limits(), Source(layer="L-a"))


async def test_a_squashed_snapshot_outlives_those_it_was_made_of(
    backend: Backend, box: str
) -> None:
    await backend.run(box, "echo one > /app/one", 10)
    await backend.snapshot(box, "L-a", keep=True)
    await backend.start("b", Limits(), Source(layer="L-a"))
    await backend.snapshot("b", "L-b", keep=False)
    await backend.squash("L-b", "L-c")
    assert await backend.drop("L-b") is True
    assert await backend.drop("L-a") is True
    await backend.start("c", Limits(), Source(layer="L-c"))
    assert await said(backend, "c", "cat /app/one") == "one\n"


async def test_a_snapshot_s_name_is_used_once(backend: Backend, box: str) -> None:
    await backend.snapshot(box, "L-a", keep=True)
    with pytest.raises(BoxFailure, match="L-a"):
        await backend.snapshot(box, "L-a", keep=True)
    assert (await backend.run(box, "exit 3", 10)).exit_code == 3


async def test_of_what_is_not_there_no_snapshot_is_made(backend: Backend, box: str) -> None:
    with pytest.raises(BoxFailure):
        await backend.snapshot("nobody", "L-a", keep=True)
    with pytest.raises(BoxFailure):
        await backend.squash("L-a", "L-b")
    await backend.seal(box)
    with pytest.raises(BoxFailure):
        await backend.snapshot(box, "L-a", keep=True)
    assert await backend.drop("L-a") is False


async def test_a_verifier_of_a_forked_box_judges_what_both_left(backend: Backend, box: str) -> None:
    await backend.run(box, "echo 1 > /app/one", 10)
    await backend.snapshot(box, "L-a", keep=False)
    await backend.start("b", Limits(), Source(layer="L-a"))
    await backend.run("b", "echo 2 > /app/two", 10)
    await backend.seal("b")
    judged = await backend.judge("b", spec("cat one two > /logs/verifier/reward.txt"))
    assert judged.files == {"reward.txt": b"1\n2\n"}


def live(script: str) -> JudgeSpec:
    return msgspec.structs.replace(spec(script), cwd="/", live=True)


async def test_a_live_verifier_sees_what_the_box_started_from_and_no_file_of_the_agent(
    backend: Backend, box: str
) -> None:
    await backend.run(box, "echo given > /app/given", 10)
    await backend.snapshot(box, "L-a", keep=False)
    await backend.start("b", Limits(), Source(layer="L-a"))
    await backend.run("b", "echo 1 > /app/answer; echo forged > /app/given", 10)
    script = "cat /app/given > /logs/verifier/reward.txt; cat /app/answer"
    judged = await backend.judge("b", live(script))
    assert judged.files == {"reward.txt": b"given\n"}
    assert judged.evidence.exit_code == 1


async def test_a_live_verifier_leaves_the_box_as_it_was(backend: Backend, box: str) -> None:
    await backend.run(box, "export COLOUR=blue; echo kept > /app/kept", 10)
    await backend.judge(box, live("echo 1 > /logs/verifier/reward.txt; echo x > /app-other"))
    assert await said(backend, box, "cat kept; echo $COLOUR") == "kept\nblue\n"
    assert (await backend.run(box, "cat /app-other", 10)).exit_code == 1
    assert (await backend.run(box, "cat /logs/verifier/reward.txt", 10)).exit_code == 1


async def test_a_sealed_box_has_no_live_verifier(backend: Backend, box: str) -> None:
    await backend.seal(box)
    with pytest.raises(BoxFailure, match="sealed"):
        await backend.judge(box, live("exit 0"))
