"""The examples stay as short as they are said to be."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from muster.seat import RESUME_FILE

EXAMPLES = Path(__file__).parents[3] / "examples"
PAGE = EXAMPLES.parent / "docs" / "integrate.md"


@pytest.mark.parametrize(("name", "most"), [("plain_pytorch.py", 40), ("trl_grpo.py", 45)])
def test_an_example_is_short(name: str, most: int) -> None:
    assert len((EXAMPLES / name).read_text("utf-8").splitlines()) <= most


@pytest.mark.parametrize("name", ["plain_pytorch.py", "trl_grpo.py"])
def test_an_example_takes_from_the_library_what_it_has(name: str) -> None:
    tree = ast.parse((EXAMPLES / name).read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("muster."):
            module = __import__(node.module or "", fromlist=["x"])
            assert all(hasattr(module, alias.name) for alias in node.names)


def test_the_loop_goes_on_from_what_was_acknowledged_and_not_from_what_was_only_saved(
    tmp_path: Path,
) -> None:
    """A kill between the two leaves a folder that no resume can be from."""
    for step in (9, 10, 11):
        (tmp_path / f"step-{step:06d}").mkdir()
    tree = ast.parse((EXAMPLES / "plain_pytorch.py").read_text("utf-8"))
    [found] = [n.value for n in tree.body if isinstance(n, ast.Assign)
               and getattr(n.targets[0], "id", "") == "newest"]  # fmt: skip

    def newest() -> object:
        return eval(compile(ast.Expression(found), "example", "eval"), {"folder": tmp_path})

    assert newest() is None
    for step in (9, 10):
        (tmp_path / f"step-{step:06d}" / RESUME_FILE).touch()
    assert newest() == tmp_path / "step-000010"


def test_the_page_shows_the_loop_that_is_run() -> None:
    """What stands between `with Publisher` and the end is the same, line by line."""
    page = {line.strip() for line in PAGE.read_text("utf-8").splitlines()}
    code = (EXAMPLES / "plain_pytorch.py").read_text("utf-8").splitlines()
    start = next(n for n, line in enumerate(code) if "with BankClient" in line)
    assert [line for line in code[start:] if line.strip() not in page] == []
