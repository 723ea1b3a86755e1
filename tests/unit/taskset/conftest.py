"""A small Harbor task folder to bend in one place per test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

FILES = {
    "instruction.md": "Create hello.txt.\n",
    "task.toml": '[task]\nname = "muster/hello"\n',
    "environment/Dockerfile": "FROM muster/host-base\nWORKDIR /app\nCOPY a.txt .\n",
    "environment/a.txt": "alpha\n",
    "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
    "solution/solve.sh": "echo hello > hello.txt\n",
}

MakeTask = Callable[..., Path]


@pytest.fixture
def make_task(tmp_path: Path) -> MakeTask:
    """`make_task("name", {"path": "content" or None to leave it out})` → its folder."""

    def make(name: str = "hello", changes: dict[str, str | None] | None = None) -> Path:
        folder = tmp_path / "set" / name
        for relative, content in {**FILES, **(changes or {})}.items():
            if content is None:
                continue
            path = folder / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
        return folder

    return make
