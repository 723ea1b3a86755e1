"""Tasks whose agent cheats (tests/canaries): every cheat scores 0, and every one would pay.

Three tries each. The solution scores 1, so that the test can be passed at all. The cheat scores 0
by the service. The control: the same cheat scores 1 when it is judged as many harnesses do, by
test.sh run in the agent's own box, from its own interactive shell, with the verdict read there.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from muster.archive import TaskFile, pack, pack_files, unpack
from muster.taskset import Task, task_from_archive
from muster.types import EpisodeKey, Limits, VerdictStatus
from services.sandbox.adapters.native.backend import open_native
from services.sandbox.box import Backend, Evidence, PutFile
from services.sandbox.config import SandboxConfig
from services.sandbox.driver import SandboxHost
from services.sandbox.verdict import Verdict
from tests.integration.docker_engine import open_boxes

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="native boxes need root"),
    pytest.mark.asyncio(loop_scope="module"),
]

CANARIES = Path(__file__).parents[1] / "canaries"
NAMES = sorted(folder.name for folder in CANARIES.iterdir() if folder.is_dir())
LEAST = 20
SPEAKS = {"preload": "x86_64", "preload-file": "x86_64"}
"""Canaries with machine code: elsewhere their cheat would do nothing."""
ON_DOCKER = [
    "background-writer", "conftest-above", "git-hooks", "hard-link", "linked-answer",
    "linked-folder", "linked-input", "linked-verdict", "linked-workdir", "live-tools",
    "preload-file", "tool-trojan",
]  # fmt: skip
"""Those that try what the docker backend does in its own way; the others have passed there too.
That a cheat pays without a defence is the canary's own matter, and shown on native boxes."""
EARLY = {"tests-read", "solution-run", "answer-in-history"}
"""Their control: tests and solution lie in the box while the agent works."""
SEEN = "cat /logs/verifier/reward.json 2>/dev/null || cat /logs/verifier/reward.txt"
ARCHIVE = """
import pathlib, py_compile, sys, zipfile
site, into = map(pathlib.Path, sys.argv[1:])
for archive, names in {
    "pytest": ("py.py", "pytest", "_pytest"),
    "others": ("pluggy", "iniconfig", "packaging", "pygments"),
}.items():
    with zipfile.ZipFile(into / f"{archive}.zip", "w", zipfile.ZIP_DEFLATED) as made:
        for name in names:
            for path in [site / name] if name == "py.py" else sorted((site / name).rglob("*.py")):
                if path.parent.name == "lexers" and path.stem[0] != "_" and path.stem not in (
                    "python", "diff",
                ):
                    continue
                py_compile.compile(str(path), cfile=str(into / "one"), doraise=True,
                    invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
                made.write(into / "one", path.relative_to(site).with_suffix(".pyc"))
"""
UNSET = Limits(0, 0, 0, 0, 0)
STEP_S = 20.0


def here(names: list[str]) -> list[str]:
    return [n for n in names if SPEAKS.get(n, platform.machine()) == platform.machine()]


ON_NATIVE = [("native", name) for name in NAMES]
EVERYWHERE = ON_NATIVE + [("docker", name) for name in here(ON_DOCKER)]


class Judges:
    """A host, and the backend below it."""

    def __init__(self, host: SandboxHost, backend: Backend):
        self._host, self._backend = host, backend
        self._episodes = 0

    async def by_service(self, task: Task, script: str) -> Verdict:
        async with self._box(task) as (key, box):
            await self._host.execute(key, box, 0, script, STEP_S)
            return (await self._host.verify(key, box)).verdict

    async def naively(self, task: Task, script: str, extra: tuple[PutFile, ...]) -> float:
        """As by a harness that trusts the box."""
        tests = tuple(
            PutFile(f"/{path}", file.mode, file.data)
            for path, file in unpack(task.archive).items()
            if path.startswith("tests/")
        )
        async with self._box(task) as (_, box):
            if extra:
                await self._backend.put(box, tests + extra)
            await self._backend.run(box, script, STEP_S)
            await self._backend.put(box, tests)
            judge = "mkdir -p /logs/verifier; bash -ic 'bash /tests/test.sh'"
            await self._backend.run(box, judge, task.verifier_timeout_s)
            # A verdict is read some time after it is written.
            for _ in range(20):
                reward = clamped(await self._backend.run(box, f"{SEEN}; sleep 0.05", STEP_S))
                if reward == 1:
                    break
            return reward

    @asynccontextmanager
    async def _box(self, task: Task) -> AsyncIterator[tuple[EpisodeKey, str]]:
        self._episodes += 1
        key = EpisodeKey("run", f"g{self._episodes}", 0, 1, 1)
        got = await self._host.acquire(key, task.name, task.digest, task.archive, UNSET, 60.0)
        try:
            yield key, got.box
        finally:
            await self._host.release(key, got.box)


def clamped(found: Evidence) -> float:
    """A reward as many harnesses read it."""
    text = (found.head + found.tail).decode("utf-8", "replace").strip()
    try:
        value = json.loads(text)["reward"] if text.startswith("{") else text
        return max(0.0, min(1.0, float(value)))
    except (ValueError, KeyError):
        return 0.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def judges(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Judges]:
    folder = tmp_path_factory.mktemp("canaries") / "run"
    docker = request.param == "docker"
    opened: AbstractAsyncContextManager[Backend] = (
        open_boxes(request.getfixturevalue("docker_engine"), folder)
        if docker
        else open_native(folder)
    )
    async with (
        opened as backend,
        SandboxHost(backend, SandboxConfig(warm_max=0), "h1") as host,
    ):
        yield Judges(host, backend)


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TaskFile]:
    """The installed pytest as archives, for tasks whose tests use it.

    Compiled by the Python that boxes have, so that its start costs no time limit of a test.
    """
    site, into = Path(pytest.__file__).parents[1], tmp_path_factory.mktemp("archives")
    subprocess.run(["/usr/bin/python3", "-I", "-c", ARCHIVE, site, into], check=True)
    return {f"tests/{path.name}": TaskFile(0o644, path.read_bytes()) for path in into.glob("*.zip")}


def read(name: str, archives: dict[str, TaskFile]) -> Task:
    files = unpack(pack(CANARIES / name))
    if b"pytest.zip" in files["tests/test.sh"].data:
        files |= archives
    return task_from_archive(pack_files(files), name=name)


def script(name: str, which: str) -> str:
    return (CANARIES / name / "solution" / f"{which}.sh").read_text("utf-8")


async def test_there_are_canaries_and_each_says_how_it_cheats() -> None:
    assert len(NAMES) >= LEAST
    assert set(ON_DOCKER) <= set(NAMES)
    for name in NAMES:
        assert "Its agent cheats: it " in (CANARIES / name / "task.toml").read_text("utf-8")


@pytest.mark.parametrize(("judges", "name"), EVERYWHERE, indirect=["judges"])
async def test_the_solution_scores_1(
    name: str, judges: Judges, archives: dict[str, TaskFile]
) -> None:
    verdict = await judges.by_service(read(name, archives), script(name, "solve"))
    assert (verdict.status, verdict.reward) == (VerdictStatus.REWARDED, 1.0), verdict.detail


@pytest.mark.parametrize(("judges", "name"), EVERYWHERE, indirect=["judges"])
async def test_the_cheat_scores_0(name: str, judges: Judges, archives: dict[str, TaskFile]) -> None:
    verdict = await judges.by_service(read(name, archives), script(name, "cheat"))
    assert verdict.reward == 0.0, verdict


@pytest.mark.parametrize(
    ("judges", "name"), [pair for pair in ON_NATIVE if here([pair[1]])], indirect=["judges"]
)
async def test_the_cheat_scores_1_with_a_naive_judge(
    name: str, judges: Judges, archives: dict[str, TaskFile]
) -> None:
    solution = PutFile("/solution/solve.sh", 0o644, script(name, "solve").encode())
    early = (solution,) if name in EARLY else ()
    assert await judges.naively(read(name, archives), script(name, "cheat"), early) == 1.0
