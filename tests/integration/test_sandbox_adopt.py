"""The service is killed: its boxes go on for its successor, and without one nothing is left."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.sandbox.adapters.native.backend import open_native
from tests.integration.sandbox_owner import ROOT, begun, ended, gone, marked, owner, traces

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="native boxes need root"),
]
NOTHING: dict[str, list[str]] = {"mounts": [], "processes": [], "groups": [], "files": []}


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[Path]:
    """The runtime folder; whatever a test leaves in it, an orderly stop removes."""
    path = tmp_path / "boxes"
    yield path
    async with open_native(path):
        pass
    assert await gone(path) == NOTHING


@pytest.fixture
def mark() -> str:
    """An argument of `sleep` that no other process has: so many seconds, and a fraction."""
    return f"1000.{random.getrandbits(40)}"


async def test_a_box_goes_on_with_files_session_and_background_processes(
    folder: Path, mark: str
) -> None:
    async with owner(folder) as first:
        await first.box("a", "mine")
        await first.step("a", 0, f"echo 7 > f; mkdir d; cd d; export X=1; sleep {mark} & :")
        await begun(mark)
        (process,) = marked(mark)
        await first.kill()
    async with owner(folder) as second:
        assert second.keeper == first.keeper
        found = (await second.survivors())["a"]
        assert (found["note"], found["newest_turn"], found["running"]) == ("mine", 0, None)
        assert await second.step("a", 1, "echo $(cat ../f) $PWD $X") == "7 /app/d 1\n"
        assert marked(mark) == [process]


async def test_a_step_goes_on_and_its_answer_is_the_successor_s(folder: Path, mark: str) -> None:
    async with owner(folder) as first:
        await first.box("a", "mine")
        await first.step("a", 0, "true")
        command = f"echo ran >> count; sleep {mark}; cat count"
        await first.begin("run", "a", command, 100, 1)
        await begun(mark)
        await first.kill()
    async with owner(folder) as second:
        found = (await second.survivors())["a"]
        assert (found["running"], found["newest_turn"]) == ([1, command], 1)
        assert [step["turn"] for step in found["kept"]] == [0]
        asked = await second.begin("rejoin", "a")
        os.kill(marked(mark)[0], signal.SIGKILL)  # its shell goes on
        assert "ran\n" in (await second.answer(asked))["output"]
        assert await second.step("a", 2, "cat count") == "ran\n"


async def test_a_step_that_ends_without_a_service_keeps_its_answer(folder: Path, mark: str) -> None:
    async with owner(folder) as first:
        await first.box("a", "mine")
        command = f"sleep {mark} 2>&1; echo out"
        await first.begin("run", "a", command, 100, 4)
        await begun(mark)
        await first.kill()
    os.kill(marked(mark)[0], signal.SIGKILL)  # its shell goes on
    await ended(mark)
    async with owner(folder) as second:
        found = (await second.survivors())["a"]
        (step,) = found["kept"]
        assert (step["turn"], step["command"], found["running"]) == (4, command, None)
        assert step["evidence"]["output"].endswith("out\n")


async def test_the_time_limit_of_a_step_holds_without_a_service(folder: Path, mark: str) -> None:
    async with owner(folder) as first:
        await first.box("a", "mine")
        await first.begin("run", "a", f"sleep {mark}", 1, 0)
        await begun(mark)
        await first.kill()
    await ended(mark)
    async with owner(folder) as second:
        (step,) = (await second.survivors())["a"]["kept"]
        assert step["evidence"]["timed_out"]


async def test_so_many_answers_are_kept_and_the_newest(folder: Path) -> None:
    async with owner(folder, kept=2) as first:
        await first.box("a", "mine")
        for turn in range(4):
            await first.step("a", turn, f"echo {turn}")
        await first.kill()
    async with owner(folder) as second:
        found = (await second.survivors())["a"]
        answers = [(step["turn"], step["evidence"]["output"]) for step in found["kept"]]
        assert answers == [(2, "2\n"), (3, "3\n")]


async def test_long_answers_are_kept_within_bounds(folder: Path) -> None:
    async with owner(folder) as first:
        await first.box("a", "mine")
        for turn in range(12):
            found = await first.step("a", turn, "head -c 900000 /dev/zero | tr '\\0' x")
            assert len(found) == 900_000
        await first.kill()
    async with owner(folder) as second:
        kept = (await second.survivors())["a"]["kept"]
        assert [step["turn"] for step in kept] == list(range(3, 12))  # 8.1 of at most 8.4 MB


async def test_a_box_without_a_note_ends_at_once(folder: Path, mark: str) -> None:
    noted, warm = f"{mark}1", f"{mark}2"
    async with owner(folder) as first:
        await first.box("noted", "mine")
        await first.step("noted", 0, f"sleep {noted} & :")
        await first.box("warm")
        await first.step("warm", 0, f"sleep {warm} & :")
        await begun(warm)
        await first.kill()
    await ended(warm)
    async with owner(folder) as second:
        assert list(await second.survivors()) == ["noted"]
        await begun(noted)
        await second.box("warm")  # the name is free


async def test_without_a_successor_nothing_is_left(folder: Path, mark: str) -> None:
    async with owner(folder, orphan_s=0.5) as first:
        await first.box("a", "mine")
        await first.begin("run", "a", f"setsid sleep {mark} & sleep {mark}", 100, 0)
        await begun(mark)
        there = traces(folder)
        assert all(there.values()), there
        await first.kill()
    assert await gone(folder) == NOTHING
    assert marked(mark) == []


async def test_a_service_without_boxes_leaves_nothing_and_waits_for_nobody(folder: Path) -> None:
    async with owner(folder, orphan_s=3600) as first:
        assert traces(folder)["processes"]
        await first.kill()
    assert await gone(folder) == NOTHING


async def test_an_orderly_stop_ends_noted_boxes_at_once(folder: Path, mark: str) -> None:
    async with owner(folder, orphan_s=3600) as first:
        await first.box("a", "mine")
        await first.begin("run", "a", f"sleep {mark}", 100, 0)
        await begun(mark)
        there = traces(folder)
        assert all(there.values()), there
        assert await first.stop() == 0
        assert traces(folder) == NOTHING


async def test_a_living_service_keeps_its_keeper(folder: Path) -> None:
    async with owner(folder) as first:
        await first.box("a", "mine")
        with pytest.raises(AssertionError, match="ended with status 1"):
            async with owner(folder):
                pass
        assert await first.step("a", 0, "echo on") == "on\n"


async def test_a_service_that_wakes_after_its_successor_came_can_do_nothing(
    folder: Path, mark: str
) -> None:
    async with owner(folder) as first:
        await first.box("a", "mine")
        await first.step("a", 0, f"sleep {mark} & :")
        os.kill(first.process.pid, signal.SIGSTOP)
        # Read by the service once it wakes, and by then nobody listens to it any more.
        await first.begin("end", "a")
        await first.begin("run", "a", "touch /app/late", 30, 1)
        async with owner(folder) as second:
            assert (await second.survivors())["a"]["newest_turn"] == 0
            os.kill(first.process.pid, signal.SIGCONT)
            async with asyncio.timeout(30):
                assert await first.process.wait() == 1
            assert await second.step("a", 1, "ls /app") == ""
            await begun(mark)


async def test_a_successor_killed_during_the_handover_hands_it_on(folder: Path, mark: str) -> None:
    async with owner(folder) as first:
        for name in ("a", "b"):
            await first.box(name, "mine")
            await first.step(name, 0, f"sleep {mark} & :")
        await begun(mark, 2)
        processes = marked(mark)
        await first.kill()
    for _ in range(3):
        async with owner(folder) as between:
            await between.begin("survivors")
            await between.kill()
    async with owner(folder) as last:
        assert set(await last.survivors()) == {"a", "b"}
        assert marked(mark) == processes
        assert await last.step("b", 1, "echo on") == "on\n"


async def test_sealed_files_outlive_the_service_and_are_judged(folder: Path, mark: str) -> None:
    async with owner(folder) as first:
        await first.box("a", "mine")
        await first.step("a", 3, f"echo 1 > answer; sleep {mark} & :")
        await begun(mark)
        await first.call("seal", "a")
        await first.kill()
    async with owner(folder) as second:
        found = (await second.survivors())["a"]
        assert (found["sealed"], found["newest_turn"], found["note"]) == (True, 3, "mine")
        assert marked(mark) == []
        await second.call("seal", "a")
        assert await second.call("judge", "a", "cat answer > /logs/verifier/reward.txt") == "1\n"


async def test_a_verifier_ends_with_its_service_and_the_files_are_judged_again(
    folder: Path, mark: str
) -> None:
    async with owner(folder) as first:
        await first.box("a", "mine")
        await first.step("a", 0, "echo 1 > answer")
        await first.call("seal", "a")
        await first.begin("judge", "a", f"sleep {mark}")
        await begun(mark)
        await first.kill()
    await ended(mark)
    async with owner(folder) as second:
        assert (await second.survivors())["a"]["sealed"]
        assert await second.call("judge", "a", "cat answer > /logs/verifier/reward.txt") == "1\n"


async def test_a_box_whose_pid_1_was_killed_is_not_adopted(folder: Path, mark: str) -> None:
    async with owner(folder) as first:
        await first.box("a", "mine")
        (init,) = children(first.keeper)
        await first.box("b", "mine")
        await first.step("a", 0, f"sleep {mark} & :")
        await begun(mark)
        await first.kill()
    os.kill(init, signal.SIGKILL)
    await ended(mark)
    async with owner(folder) as second:
        assert list(await second.survivors()) == ["b"]
        await second.box("a")


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def test_a_keeper_that_dies_takes_its_boxes_along(folder: Path, mark: str) -> None:
    async with owner(folder) as first:
        await first.box("a", "mine")
        await first.step("a", 0, f"sleep {mark} & :")
        await begun(mark)
        await first.kill()
    os.kill(first.keeper, signal.SIGKILL)
    await ended(mark)
    async with owner(folder) as second:
        assert await second.survivors() == {}
        await second.box("a")
        assert await second.step("a", 0, "echo on") == "on\n"


async def test_boxes_of_a_service_that_was_told_to_stop_outlive_it_by_nothing(
    folder: Path, mark: str
) -> None:
    """It was ended before it had done all that a stop asks for."""
    async with owner(folder, orphan_s=3600) as first:
        await first.box("a", "mine")
        await first.step("a", 0, f"sleep {mark} & :")
        await begun(mark)
        await first.call("stopping")
        await first.kill()
    await ended(mark)


async def test_a_successor_from_elsewhere_finds_the_boxes(folder: Path, tmp_path: Path) -> None:
    async with owner(folder) as first:
        await first.box("a", "mine")
        await first.kill()
    async with owner(folder, before=("unshare", "-m"), cwd=tmp_path) as second:
        assert list(await second.survivors()) == ["a"]
        assert await second.step("a", 0, "echo on") == "on\n"


async def test_a_service_of_another_release_starts_anew(
    folder: Path, tmp_path: Path, mark: str
) -> None:
    code = tmp_path / "code"
    for name in ("muster", "services", "tests"):
        shutil.copytree(ROOT / name, code / name, ignore=shutil.ignore_patterns("__pycache__"))
    changed = code / "services/sandbox/adapters/native/lock.py"
    changed.write_text(changed.read_text("utf-8") + "# newer\n", "utf-8")
    async with owner(folder) as first:
        await first.box("a", "mine")
        await first.step("a", 0, f"sleep {mark} & :")
        await begun(mark)
        await first.kill()
    async with owner(folder, code=code) as newer:
        assert newer.keeper != first.keeper
        assert (await newer.survivors(), marked(mark)) == ({}, [])
        await newer.box("a")
        assert await newer.step("a", 0, "echo on") == "on\n"


async def test_nothing_in_a_box_reaches_the_ways_that_lead_out(folder: Path) -> None:
    async with owner(folder) as first:
        await first.box("a", "mine")
        await first.kill()
    async with owner(folder) as second:
        await second.survivors()
        look = (
            "ls /proc/1/fd 2>&1 | head -1; ls /proc/self/fd | wc -l;"
            "find / -xdev -type s 2>/dev/null; cat /proc/net/unix | wc -l"
        )
        # ls itself has 0, 1, 2 and the folder; a socket that somebody in this network listens on
        # would be a line below the heading.
        said = await second.step("a", 0, look)
    absent = "ls: cannot access '/proc/1/fd': No such file or directory"
    assert said.splitlines() == [absent, "4", "1"]


async def test_a_note_has_a_bound(folder: Path) -> None:
    async with owner(folder) as first:
        await first.box("a", "mine")
        with pytest.raises(AssertionError, match="more than is kept"):
            await first.call("note", "a", "x", (4 << 20) + 1)
        await first.call("note", "a", "y", 4 << 20)
        await first.kill()
    async with owner(folder) as second:
        assert (await second.survivors())["a"]["note"] == "y" * (4 << 20)


@pytest.mark.timeout(300)
async def test_killed_at_any_moment_a_step_runs_once_and_nothing_is_left(folder: Path) -> None:
    dice = random.Random(4)
    async with owner(folder) as first:
        await first.box("a", "mine")
        await first.kill()
    for number in range(int(os.environ.get("MUSTER_TEST_EXAMPLES", "1000")) // 100):
        async with owner(folder) as one:
            found = (await one.survivors())["a"]
            if found["running"]:
                await one.call("rejoin", "a")
            next_turn = found["newest_turn"] + 1
            count = await one.step("a", next_turn, "echo x >> n; wc -l < n")
            assert int(count) == next_turn + 1, number
            await one.begin("start", f"warm{number}")
            for turn in range(next_turn + 1, next_turn + 6):
                await one.begin("run", "a", "echo x >> n; sleep 0.01", 30, turn)
            await asyncio.sleep(dice.uniform(0, 0.15))
            await one.kill()
