"""Which lines look for a network."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster import fetching
from muster.taskset import examine
from tests.unit.taskset.conftest import MakeTask


@pytest.mark.parametrize(
    ("command", "tool"),
    [
        ("pip install requests", "pip"),
        ("python3 -m pip install --user requests", "pip"),
        ("uv pip install pytest", "uv"),
        ("uv sync", "uv"),
        ("cd app && npm ci", "npm"),
        ("curl -LsSf https://astral.sh/uv/install.sh | sh", "curl"),
        ("wget -q http://x.org/a.tar", "wget"),
        ("git clone --depth 1 https://x.org/a", "git"),
        ("uvx pytest", "uvx"),
        ("apt-get update || true", "apt-get"),
    ],
)
def test_what_fetches_is_known_by_its_tool(command: str, tool: str) -> None:
    assert fetching.fetches(command) == tool


@pytest.mark.parametrize(
    "command",
    [
        "pip install --no-index ./wheels/a.whl",
        "curl http://127.0.0.1:8080/x",
        "pip --version",
        "echo pipeline > install",
        "npm run build",
        "git clone /srv/repo",
    ],
)
def test_what_needs_no_network_is_left_alone(command: str) -> None:
    assert fetching.fetches(command) == ""


def test_a_line_that_may_fetch_is_a_remark_and_no_refusal(make_task: MakeTask) -> None:
    text = "FROM x\n# why\nRUN pip install requests\n"
    seen = examine(make_task("hello", {"environment/Dockerfile": text}))
    assert seen.task is not None
    assert seen.task.unbuildable == ""
    [remark] = [one for one in seen.remarks if "pip" in one.text]
    assert remark.field == "environment/Dockerfile line 3: RUN"


def test_a_link_and_a_large_file_are_told_by_their_path(make_task: MakeTask) -> None:
    folder = make_task()
    (folder / "tests" / "link").symlink_to(Path("test.sh"))
    assert "tests/link is a link" in examine(folder).refusals[0].problem
    (folder / "tests" / "link").unlink()
    (folder / "tests" / "large.bin").write_bytes(bytes((1 << 20) + 1))
    assert "tests/large.bin is over" in examine(folder).refusals[0].problem
