"""What went wrong elsewhere, on real boxes: one test for each report that another does not tell.

The numbers are those of the collected reports on sandboxes for agents (there is no 15, 18, 22, 31).
COVERED names the tests elsewhere that tell a report; the others are told here. Not of a native
host: 12 (address pools of networks: a box has an empty network namespace and needs no address),
13 in its letter (keystrokes of a terminal: a step is one command; its bytes are counted), 30
(registries: nothing is pulled), and of 10 the half where a script goes on after a failed download
and writes 0: no host can tell that from a score, which is why a task must not download.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from muster.types import Limits, StepLimit, VerdictStatus
from services.sandbox import verdict
from services.sandbox.adapters.native.backend import NativeBackend, open_native
from services.sandbox.box import Evidence, Judgement, JudgeSpec, PutFile
from services.sandbox.ledger import which_limit

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="native boxes need root"),
]
ENV = {"PATH": "/usr/bin:/bin", "HOME": "/root"}
COVERED = {
    1: "test_nothing_outlives_the_time_limit_of_its_step",
    5: "test_after_sigkill_of_the_service_nothing_is_left",
    6: "test_the_time_limit_is_named_and_the_session_goes_on",
    7: "test_a_planted_verdict_is_not_there_for_the_verifier",
    9: "test_anything_else_is_invalid_and_says_what_was_found",
    17: "test_the_time_limit_ends_a_step_and_keeps_output_and_session",
    20: "test_a_death_by_another_hand_is_not_told_as_out_of_memory",
    21: "test_orphans_are_reaped",
    23: "test_starts_are_bounded_and_callers_served_in_order",
    24: "test_the_queue_is_bounded",
    25: "test_a_box_that_stands_ready_is_alive_and_an_ended_one_is_not",
    26: "test_a_killed_pid_1_is_the_host_s_loss_and_spares_the_other_boxes",
    27: "test_nothing_outlives_the_time_limit_of_its_step",
    29: "test_after_sigkill_of_service_and_keeper_the_next_start_sweeps",
    32: "test_a_step_lost_by_the_host_is_no_result_and_its_box_is_gone",
    33: "test_after_sigkill_of_the_service_nothing_is_left",
    34: "test_what_cannot_be_copied_out_is_refused_by_name",
}
NOT_NATIVE = {12, 30}
LISTED = set(range(1, 36)) - {15, 18, 22, 31}


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[NativeBackend]:
    async with open_native(tmp_path / "run") as made:
        await made.start("a", Limits(128 << 20, 32))
        await made.set_session("a", "/app", dict(ENV))
        yield made


def output(found: Evidence) -> str:
    return (found.head + found.tail).decode("utf-8", "replace")


async def told(backend: NativeBackend, command: str, timeout_s: float = 20) -> str:
    return output(await backend.run("a", command, timeout_s))


async def judged(backend: NativeBackend, script: str, timeout_s: float = 20) -> Judgement:
    test = PutFile("/tests/test.sh", 0o755, script.encode())
    spec = JudgeSpec((test,), "/tests/test.sh", "/app", dict(ENV), timeout_s, Limits())
    return await backend.judge("a", spec)


def test_each_report_is_told_by_a_test_that_exists() -> None:
    texts = [path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py")]
    there = {name for text in texts for name in re.findall(r"def (test_\w+)\(", text)}
    assert set(COVERED.values()) - there == set()
    here = {int(n) for name in globals() for n in re.findall(r"_report_(\d+)", name)}
    assert here & set(COVERED) == set()
    assert here | set(COVERED) | NOT_NATIVE == LISTED


async def test_report_2_the_agent_does_not_run_beside_the_verifier(backend: NativeBackend) -> None:
    count = "i=0; while :; do echo $((i += 1)) > /app/new; mv /app/new /app/count; done"
    writer = f"(trap '' TERM; {count}) >/dev/null 2>&1 & disown"
    began = await told(backend, f"{writer}; until test -s count; do :; done; cat count")
    assert int(began) > 0  # it runs
    await backend.seal("a")
    script = "cat /app/count > /logs/verifier/reward.txt; ls /proc | grep -c '^[0-9]'"
    first, second = await judged(backend, script), await judged(backend, script)
    assert first.files == second.files
    assert int(output(first.evidence)) <= 4  # the verifier's own: its shell, ls and grep


async def test_report_3_report_4_steps_that_time_out_use_nothing_up(
    backend: NativeBackend,
) -> None:
    # Each leaves six processes, three of them with a session of their own; the box has room for 32.
    hang = "for i in 1 2 3; do sleep 600 & setsid sleep 600 & done; trap '' TERM; sleep 600"
    for _ in range(8):
        assert which_limit(await backend.run("a", hang, 0.2)) is StepLimit.TIME
    after = await backend.run("a", "ls -d /proc/[0-9]* | wc -l; (echo on) | cat", 20)
    assert (after.pids_refused, output(after).split()[-1]) == (0, "on")
    assert int(output(after).split()[0]) <= 4


async def test_report_8_a_background_writer_of_verdicts_writes_nothing_that_is_read(
    backend: NativeBackend,
) -> None:
    write = "while :; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; done"
    await told(backend, f"(setsid bash -c '{write}' >/dev/null 2>&1 &)")
    await told(backend, "until test -s /logs/verifier/reward.txt; do :; done")
    await backend.seal("a")
    found = await judged(backend, "sleep 0.3; echo 0 > /logs/verifier/reward.txt; sleep 0.3")
    assert found.files == {"reward.txt": b"0\n"}


async def test_report_10_a_verifier_that_lacks_its_tool_is_no_score(
    backend: NativeBackend,
) -> None:
    await backend.seal("a")
    found = await judged(backend, "curl -LsSf https://tool.invalid/install.sh | sh\nuvx pytest")
    read = verdict.read(found)
    assert read.status is VerdictStatus.SETUP_FAILED
    assert "not found" in output(found.evidence)


async def test_report_11_a_verdict_of_an_earlier_try_is_not_read(backend: NativeBackend) -> None:
    await backend.seal("a")
    first = await judged(backend, "echo 1 > /logs/verifier/reward.txt")
    assert verdict.read(first).status is VerdictStatus.REWARDED
    second = await judged(backend, "sleep 60", timeout_s=0.3)
    assert (second.files, verdict.read(second).status) == ({}, VerdictStatus.TIMEOUT)


async def test_report_13_a_long_command_of_wide_characters_runs_whole(
    backend: NativeBackend,
) -> None:
    assert await told(backend, f"printf %s '{'漢' * 20_000}' | wc -c") == "60000\n"


@pytest.mark.parametrize(
    "leave",
    [
        "sleep 600 &",
        "setsid sleep 600 &",
        "nohup sleep 600 &",
        "(sleep 600 &)",
        "python3 -c 'import os, time; os.fork() or time.sleep(600)'",
    ],
)
async def test_report_14_a_step_returns_at_exit_though_a_daemon_holds_its_output(
    leave: str, backend: NativeBackend
) -> None:
    found = await backend.run("a", f"{leave} echo left", 20)
    assert not found.timed_out
    assert await told(backend, "ls -d /proc/[0-9]*/exe | wc -l") != "0\n"
    await told(backend, "kill -9 -1")


async def test_report_16_output_beyond_a_pipe_blocks_nothing_and_its_cut_is_told(
    backend: NativeBackend,
) -> None:
    found = await backend.run("a", "python3 -c 'print(\"x\" * 160910)'; echo end", 20)
    assert (found.exit_code, found.total) == (0, 160_911 + 4)
    assert len(found.head + found.tail) == Limits().output_bytes
    assert found.tail.endswith(b"x\nend\n")


async def test_report_19_out_of_memory_is_told_and_the_box_is_the_same_after_it(
    backend: NativeBackend,
) -> None:
    await told(backend, "echo kept > /app/state; export COLOUR=blue")
    found = await backend.run("a", "python3 -c 'bytearray(300 << 20)'", 20)
    assert which_limit(found) is StepLimit.MEMORY
    assert await told(backend, "cat /app/state; echo $COLOUR") == "kept\nblue\n"


@pytest.mark.parametrize(
    "pretend",
    [
        "trap 'exit 0' TERM INT HUP EXIT; sleep 60 & wait",
        "trap 'exit 0' EXIT; while :; do :; done",
        "echo exit=0; exec sleep 60",
    ],
)
async def test_report_28_a_time_limit_is_never_told_as_success(
    pretend: str, backend: NativeBackend
) -> None:
    found = await backend.run("a", pretend, 0.3)
    assert (found.timed_out, found.exit_code, found.signal) == (True, 137, 9)
    assert which_limit(found) is StepLimit.TIME


@pytest.mark.parametrize(
    "stuck",
    [
        "trap '' TERM INT HUP; sleep 600",
        "kill -STOP $$",
        "(sleep 600 & kill -STOP $!); kill -STOP $$",
        "mkfifo pipe; cat pipe",
        "exec 2>&- 1>&-; sleep 600",
        "yes",
    ],
)
async def test_report_35_a_stuck_command_takes_no_session_with_it(
    stuck: str, backend: NativeBackend
) -> None:
    await told(backend, "mkdir -p deep; cd deep; export COLOUR=blue")
    assert (await backend.run("a", stuck, 0.4)).timed_out
    assert await told(backend, "pwd; echo $COLOUR; ps -e | grep -c sleep") == "/app/deep\nblue\n0\n"
