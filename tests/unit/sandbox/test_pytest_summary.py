"""The verdict of Terminal-Bench 1: pytest's own summary, and no other text in the output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from muster.types import VerdictStatus
from services.sandbox.box import Evidence, Judgement
from services.sandbox.pytest_summary import Summary, read
from services.sandbox.verdict import read as verdict

HEADER = "=========================== short test summary info ============================\n"
PASSED = f"{HEADER}PASSED t.py::a\nPASSED t.py::b\n=========== 2 passed in 0.01s ===========\n"
FAILED = f"{HEADER}PASSED t.py::a\nFAILED t.py::b - no\n===== 1 failed, 1 passed in 0.01s =====\n"
FAKE = "\n" + PASSED


def of(text: str) -> Summary | None:
    return read(Evidence(head=text.encode(), total=len(text.encode())))


def run_pytest(folder: Path, tests: str, *options: str) -> str:
    """What real pytest prints about a file of tests; without the settings of this project."""
    (folder / "test_outputs.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "fake.txt").write_text(FAKE)
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return done.stdout.decode()


ALL_PASS = """
import pytest, warnings
def test_a(): warnings.warn("one")
@pytest.mark.parametrize("n", ["x y", "[2]", "FAILED z"])
def test_b(n): print("said")
@pytest.mark.skip(reason="not here")
def test_c(): pass
@pytest.mark.skip(reason="not here")
def test_d(): pass
@pytest.mark.xfail
def test_e(): assert False
"""


@pytest.mark.parametrize("options", [("-rA",), ("-rA", "-q"), ("-rA", "-v", "--color=yes")])
def test_what_pytest_prints_of_passing_tests_is_1(tmp_path: Path, options: tuple[str, ...]) -> None:
    assert of(run_pytest(tmp_path, ALL_PASS, *options)) == Summary(1.0)


@pytest.mark.parametrize(
    "more",
    [
        "def test_z(): assert 0",
        "@pytest.fixture\ndef broken(): raise OSError\ndef test_z(broken): pass",
        "@pytest.mark.xfail\ndef test_z(): pass",
        "import nothing_of_that_name",
    ],
    ids=["failed", "error", "xpass", "collection"],
)
def test_what_pytest_prints_of_one_that_does_not_pass_is_0(tmp_path: Path, more: str) -> None:
    assert of(run_pytest(tmp_path, f"{ALL_PASS}\n{more}\n", "-rA")) == Summary(0.0)


def test_a_summary_that_lists_failures_only_is_enough_for_0(tmp_path: Path) -> None:
    assert of(run_pytest(tmp_path, f"{ALL_PASS}\ndef test_z(): assert 0\n")) == Summary(0.0)


def test_without_its_list_of_passes_there_is_no_summary(tmp_path: Path) -> None:
    assert of(run_pytest(tmp_path, "def test_a(): pass\n")) is None


# What the agent's program says while a test runs it; pytest shows it before its own summary.
RUNS_IT = """
import subprocess
def test_a():
    subprocess.run(["cat", "fake.txt"], check=True)
    assert 0
"""


@pytest.mark.parametrize("options", [("-rA",), ("-rA", "-s")], ids=["captured", "not captured"])
def test_a_program_that_prints_a_summary_of_its_own_gains_nothing(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    printed = run_pytest(tmp_path, RUNS_IT, *options)
    assert "PASSED t.py::b" in printed.splitlines(), "the fake was printed"
    assert of(printed) == Summary(0.0)


def test_a_program_s_summary_takes_nothing_from_tests_that_pass(tmp_path: Path) -> None:
    printed = run_pytest(tmp_path, RUNS_IT.replace("assert 0", ""), "-rA")
    assert "PASSED t.py::b" in printed.splitlines()
    assert of(printed) == Summary(1.0)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (FAILED + PASSED, 0.0),  # printed behind the real one, by what outlived pytest
        (PASSED + FAILED, 0.0),
        (PASSED + "noise\n" + PASSED, 1.0),  # a script that runs pytest twice
        ("FAILED to start\n" + PASSED, 1.0),  # before any summary: no test
        (PASSED.replace("2 passed", "1 failed, 2 passed"), 0.0),
        (PASSED.replace("\n", "\r\n"), 1.0),
        (f"{HEADER}SKIPPED [3] t.py:1: why\n===== 3 skipped in 1.00s =====\n", 1.0),
        (f"{HEADER}XFAIL t.py::a - why\n== 1 xfailed in 99.00s (0:01:39) ==\n\n\n", 1.0),
        (f"{HEADER}SUBFAILED[i=1] t.py::a - no\n== 1 failed, 1 passed in 1.00s ==\n", 0.0),
    ],
)
def test_a_failure_in_any_summary_is_0(text: str, reward: float) -> None:
    assert of(text) == Summary(reward)


@pytest.mark.parametrize(
    "text",
    [
        PASSED + "done\n",
        PASSED[: PASSED.index("====== 2")],
        PASSED.replace("2 passed", "3 passed"),
        PASSED.replace("2 passed", "2 passed, 1 skipped"),
        PASSED.replace("2 passed", "1 passed"),
        HEADER,
        f"{HEADER}== 1 warning in 0.01s ==\n",
        f"{HEADER}PASSED t.py::a\n== no tests ran in 0.01s ==\n",
        PASSED + HEADER,
    ],
)
def test_a_summary_that_is_not_whole_counts_for_nothing(text: str) -> None:
    found = of(text)
    assert found is not None
    assert (found.reward, bool(found.problem)) == (None, True)


def test_of_a_cut_output_the_tail_is_looked_at() -> None:
    tail = Evidence(head=FAILED.encode(), tail=("cut\n" + PASSED).encode(), total=1 << 30)
    assert read(tail) == Summary(1.0)
    half = Evidence(head=PASSED.encode(), tail=PASSED[100:].encode(), total=1 << 30)
    assert read(half) is None


def test_a_long_hostile_output_is_read_in_time() -> None:
    text = HEADER + "=" * 200_000 + "\n" + "1 passed, " * 20_000 + "\n" + PASSED
    assert of(text) == Summary(1.0)


@pytest.mark.parametrize(
    ("text", "exit_code", "status"),
    [
        (PASSED, 0, VerdictStatus.REWARDED),
        (PASSED, 1, VerdictStatus.REWARDED),
        ("pytest: command not found\n", 127, VerdictStatus.SETUP_FAILED),
        ("nothing\n", 0, VerdictStatus.INVALID),
        # Spoiling the summary is no way to be nobody's failure.
        (PASSED + "noise\n", 127, VerdictStatus.INVALID),
    ],
)
def test_the_summary_becomes_a_verdict(text: str, exit_code: int, status: VerdictStatus) -> None:
    found = verdict(Judgement(Evidence(exit_code=exit_code, head=text.encode())), "pytest")
    assert found.status is status
    assert bool(found.detail) == (status is not VerdictStatus.REWARDED)


def test_a_summary_from_before_the_time_limit_does_not_count() -> None:
    late = Judgement(Evidence(head=PASSED.encode(), timed_out=True))
    assert verdict(late, "pytest").status is VerdictStatus.TIMEOUT


def test_each_kind_of_verdict_is_read_from_its_own_place_only() -> None:
    both = Judgement(Evidence(head=PASSED.encode()), {"reward.txt": b"0.5"})
    assert (verdict(both, "pytest").reward, verdict(both, "files").reward) == (1.0, 0.5)
    files = Judgement(Evidence(), {"reward.txt": b"1"})
    assert verdict(files, "pytest").status is VerdictStatus.INVALID
