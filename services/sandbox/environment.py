"""A task's environment as the actions that prepare a box, and its verifier. Pure.

Promise: what the Dockerfile says, in order: files copied, folders made, commands run with the
variables set so far; nothing of tests/ or solution/ enters the agent's box. `content` is the same
for two tasks exactly when their boxes are prepared alike, whatever they are called and however
they are judged. Does not cover: which base an image is (bases.py).
"""

from __future__ import annotations

import hashlib
import shlex

import msgspec

from muster import box_offer
from muster.dockerfile import FILE, CopyFiles, RunCommand, SetEnv, SetWorkdir, copied, run_lines
from muster.errors import InvalidInput
from muster.taskset import Task, TaskFile, environment_files
from muster.types import Limits, Value
from services.sandbox import pytest_summary
from services.sandbox.box import JudgeSpec, PutFile

# As image builders have it. Where a verifier runs, all of it is what the box started from.
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BASE_ENV = {
    "PATH": _PATH,
    "HOME": "/root",
    "USER": "root",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
}
TESTS = "/tests"  # where the verifier finds the task's tests, in both formats of tasks
# The verifier's own: no folder that the agent could write decides what code runs. Profiles and
# settings are looked for beside the tests, not in the agent's home; a repository of the agent's
# names no programs for git to run in passing.
VERIFIER_ENV = {
    "PATH": _PATH,
    "HOME": TESTS,
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PYTHONNOUSERSITE": "1",
    "PYTHONSAFEPATH": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "GIT_CONFIG_COUNT": "2",
    "GIT_CONFIG_KEY_0": "core.fsmonitor",
    "GIT_CONFIG_VALUE_0": "false",
    "GIT_CONFIG_KEY_1": "core.hooksPath",
    "GIT_CONFIG_VALUE_1": "/dev/null",
}
# Lists of folders and files that decide what code a verifier's programs are; where they may lie.
_DECIDING = (
    "PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHOME", "PERL5LIB", "RUBYLIB",
    "NODE_PATH", "BASH_ENV", "ENV",
)  # fmt: skip
_TRUSTED = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "tests")
_SCRIPT = "muster-run-tests.sh"  # a script of the task that does not lie in tests/ is put there so


class Put(Value, frozen=True, tag=True):
    files: tuple[PutFile, ...]


class Enter(Value, frozen=True, tag=True):
    """Make and enter the folder; the environment from here on."""

    cwd: str
    env: dict[str, str]


class RunSetup(Value, frozen=True, tag=True):
    """A command of the task's author; it must succeed. shown: "FILE line N: " and it."""

    command: str
    shown: str


Action = Put | Enter | RunSetup


def actions(task: Task, files: dict[str, TaskFile]) -> list[Action]:
    """What to do in a fresh box before its first step; the last action is the session's Enter."""
    context = environment_files(files)
    cwd, env = "/", dict(BASE_ENV)
    text = context["Dockerfile"].data.decode("utf-8", "replace") if task.build else ""
    numbers = iter(run_lines(text))
    file = FILE if task.verdict == "files" else "Dockerfile"  # as the format has it
    done: list[Action] = []
    for step in task.build:
        match step:
            case SetWorkdir(path):
                cwd = path
                done.append(Enter(cwd, dict(env)))
            case SetEnv(name, value):
                env[name] = value
            case CopyFiles():
                done.append(Put(_copies(step, context)))
            case RunCommand(command):
                # A RUN starts from the Dockerfile's state, whatever the one before it left.
                done += [
                    Enter(cwd, dict(env)),
                    RunSetup(
                        f"exec /bin/sh -c {shlex.quote(command)}",
                        f"{file} line {next(numbers, 0)}: {command}",
                    ),
                ]
    return [*done, Enter(task.workdir, env | dict(task.env))]


def _copies(step: CopyFiles, context: dict[str, TaskFile]) -> tuple[PutFile, ...]:
    return tuple(
        PutFile(target, context[path].mode if step.mode is None else step.mode, context[path].data)
        for path, target in copied(step, context)
    )


def check(task: Task, *, builds: bool) -> None:
    """Raises InvalidInput for a task whose environment this host cannot make, or whose verifier
    would run what the agent can write.

    builds: whether its backend builds Dockerfiles itself.
    """
    box_offer.check_builds(task, builds=builds)
    for name, value in task.verifier_env:
        if name in _DECIDING:
            _check_trusted(name, value)


def _check_trusted(name: str, value: str) -> None:
    """Raises InvalidInput where the agent's files would be the verifier's tools."""
    # A loader takes blanks between its libraries as well.
    parts = value.replace(" ", ":").split(":") if name == "LD_PRELOAD" else value.split(":")
    for part in parts:
        first, *others = part.removeprefix("/").split("/")
        if part.startswith("/") and first in _TRUSTED and ".." not in others:
            continue
        raise InvalidInput(
            f"the verifier would take its tools from {part or 'its working folder'!r}, where the "
            "agent can put its own",
            field=f"verifier.env.{name}",
            value=value,
            way_out="install them below /usr or bring them in tests/; a program of the agent's "
            "that is tested gets the variable from tests/test.sh, for itself alone",
        )


def content(task: Task, files: dict[str, TaskFile], base: str = "", *, builds: bool = False) -> str:
    """What the task's set-up is made of, as a sha256 (hexadecimal).

    base: the name of the base that the image in FROM stands for here; the image itself without.
    builds: whether the backend builds Dockerfiles itself; then all of environment/ counts.
    """
    told = hashlib.sha256()
    context = environment_files(files)
    for name, value in (
        ("base", base or task.base),
        ("env", dict(task.env)),
        ("workdir", task.workdir),
        ("builds", builds),
    ):
        _tell(told, name, value)
    for step in task.build:
        _tell(told, type(step).__name__, step)
        if isinstance(step, CopyFiles):
            for put in _copies(step, context):
                _tell(told, "file", (put.path, put.mode), put.data)
    if builds:
        for path, file in sorted(context.items()):
            _tell(told, "file", (path, file.mode), file.data)
    return told.hexdigest()


def _tell(told: hashlib._Hash, name: str, value: object, data: bytes = b"") -> None:
    """One part, with lengths before it: no two lists of parts read the same."""
    head = msgspec.json.encode((name, value, len(data)), order="deterministic")
    told.update(len(head).to_bytes(8, "little") + head + data)


def judge_spec(task: Task, files: dict[str, TaskFile], limits: Limits) -> JudgeSpec:
    """How the task's verifier runs: tests/ at /tests, in the task's folder, in a clean room.

    $TEST_DIR says where, as Terminal-Bench's scripts expect it. With task.verify "live" it runs
    beside the agent's living processes.
    """
    tests = {
        "/" + path: file
        for path, file in files.items()
        if path.startswith("tests/") or path == task.test_script
    }
    script = "/" + task.test_script
    if not task.test_script.startswith("tests/"):
        script = f"{TESTS}/{_SCRIPT}"
        tests[script] = tests.pop("/" + task.test_script)
    env = VERIFIER_ENV | {"TEST_DIR": TESTS} | dict(task.verifier_env)
    if task.verdict == "pytest":  # what it prints is the verdict: all of it is wanted
        most = max(limits.output_bytes, pytest_summary.OUTPUT_BYTES)
        limits = msgspec.structs.replace(limits, output_bytes=most)
    return JudgeSpec(
        tuple(PutFile(path, file.mode, file.data) for path, file in tests.items()),
        script,
        task.workdir,
        env,
        task.verifier_timeout_s,
        limits,
        live=task.verify == "live",
    )


def bounded(spec: JudgeSpec, timeout_s_max: float) -> JudgeSpec:
    """The same with the host's bound on a verifier's time."""
    return msgspec.structs.replace(spec, timeout_s=min(spec.timeout_s, timeout_s_max))
