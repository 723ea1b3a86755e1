"""Failpoints: what they do, and that each name stands exactly once, in its own service."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from muster.failpoints import NAMES

ROOT = Path(__file__).parents[3]
SERVICES = ("router", "readybank", "trainer", "sandbox", "inference")


def run(code: str, folder: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: failpoints are read once, at import."""
    more = {"MUSTER_TEST_FAILPOINT_DIR": str(folder)} if folder else {}
    text = f"import asyncio\nfrom muster import failpoints\n{code}"
    environment = {**os.environ, **environ, **more}
    return subprocess.run(
        [sys.executable, "-c", text], env=environment, cwd=ROOT, capture_output=True, text=True
    )


TWICE = (
    "async def main():\n"
    "    for n in range(2):\n"
    "        try: await failpoints.at('router.exec.before'); print('passed')\n"
    "        except failpoints.Unavailable as error: print(error)\n"
    "asyncio.run(main())"
)


def test_without_configuration_they_do_nothing() -> None:
    assert run(TWICE).stdout == "passed\npassed\n"


def test_a_lie_is_told_once_at_the_pass_that_was_named() -> None:
    done = run(TWICE, MUSTER_TEST_FAILPOINTS="router.exec.before=lie@2")
    first, second = done.stdout.splitlines()
    assert first == "passed"
    assert "router.exec.before: reported as failed" in second


def test_a_rate_fails_that_share_of_the_passes_in_every_start_alike() -> None:
    code = (
        "from muster.errors import HostUnfit\n"
        "async def main():\n"
        "    for n in range(1000):\n"
        "        try: await failpoints.at('router.exec.before'); print('.', end='')\n"
        "        except HostUnfit: print('x', end='')\n"
        "asyncio.run(main())"
    )
    plan = {"MUSTER_TEST_FAILPOINTS": "router.exec.before=fail%20"}
    told = run(code, **plan).stdout
    assert len(told) == 1000
    assert 150 < told.count("x") < 250
    assert run(code, **plan).stdout == told


def test_a_kill_ends_the_process_there() -> None:
    done = run(TWICE, MUSTER_TEST_FAILPOINTS="router.exec.before=kill")
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


def test_every_pass_is_counted(tmp_path: Path) -> None:
    run(TWICE, tmp_path, MUSTER_TEST_FAILPOINTS="router.exec.before=lie@2")
    [hits] = tmp_path.glob("hits.*")
    assert hits.read_text() == "router.exec.before pass\nrouter.exec.before lie\n"


def test_a_kill_is_counted_before_it_acts(tmp_path: Path) -> None:
    run(TWICE, tmp_path, MUSTER_TEST_FAILPOINTS="router.exec.before=kill")
    [hits] = tmp_path.glob("hits.*")
    assert hits.read_text() == "router.exec.before kill\n"


def test_an_action_happens_once_over_all_starts_of_the_process(tmp_path: Path) -> None:
    plan = {"MUSTER_TEST_FAILPOINTS": "router.exec.before=kill"}
    assert run(TWICE, tmp_path, **plan).returncode == -signal.SIGKILL
    assert run(TWICE, tmp_path, **plan).stdout == "passed\npassed\n"


def test_a_hold_lasts_until_its_file_is_removed(tmp_path: Path) -> None:
    held = tmp_path / "router.exec.before.held"
    code = (
        "import pathlib\n"
        "async def main():\n"
        "    async with asyncio.TaskGroup() as tasks:\n"
        "        held = tasks.create_task(failpoints.at('router.exec.before'))\n"
        f"        there = pathlib.Path({str(held)!r})\n"
        "        while not there.exists(): await asyncio.sleep(0)\n"
        "        print('held', held.done()); there.unlink()\n"
        "    print('went on')\n"
        "asyncio.run(main())"
    )
    done = run(code, tmp_path, MUSTER_TEST_FAILPOINTS="router.exec.before=hold")
    assert done.stdout == "held False\nwent on\n"


@pytest.mark.parametrize(
    "text", ["router.exec=kill", "router.exec.before=burn", "router.exec.before=lie@x", "x"]
)
def test_a_plan_that_is_none_is_refused(text: str) -> None:
    done = run("", MUSTER_TEST_FAILPOINTS=text)
    assert f"MUSTER_TEST_FAILPOINTS = '{text}': not a failpoint" in done.stderr


def test_a_name_that_is_not_listed_is_a_bug() -> None:
    code = "asyncio.run(failpoints.at('router.nothing.before'))"
    done = run(code, MUSTER_TEST_FAILPOINTS="router.exec.before=lie")
    assert "AssertionError: router.nothing.before is not in" in done.stderr


def test_there_are_forty_and_every_service_has_some() -> None:
    assert len(NAMES) >= 40
    assert {name.partition(".")[0] for name in NAMES} == set(SERVICES)
    assert all(name.endswith((".before", ".after")) for name in NAMES)


def _placed() -> Counter[tuple[str, str]]:
    """(name, service) of every text in services/ that looks like a failpoint's name."""
    name = re.compile(rf"({'|'.join(SERVICES)})\.[a-z_]+\.(before|after)")
    return Counter(
        (node.value, path.relative_to(ROOT / "services").parts[0])
        for path in sorted((ROOT / "services").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and name.fullmatch(node.value)
    )


def test_each_failpoint_stands_exactly_once_in_its_service() -> None:
    wanted = Counter({(name, name.partition(".")[0]): 1 for name in NAMES})
    placed = _placed()
    assert sorted((wanted - placed).keys()) == [], "listed, and nowhere in the code"
    assert sorted((placed - wanted).keys()) == [], "twice, elsewhere, or not listed"
