"""A task's environment as the actions that prepare a box, and its verifier. Pure.

Promise: what the Dockerfile says, in order: files copied, folders made, commands run with the
variables set so far; nothing of tests/ or solution/ enters the agent's box.
"""

from __future__ import annotations

import shlex

import msgspec

from muster.dockerfile import CopyFiles, RunCommand, SetEnv, SetWorkdir, copied
from muster.taskset import Task, TaskFile, environment_files
from muster.types import Limits, Value
from services.sandbox.box import JudgeSpec, PutFile

BASE_ENV = {
    "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
    "HOME": "/root",
    "USER": "root",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
}
# The verifier's own: no folder that the agent could write decides what code runs.
VERIFIER_ENV = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PYTHONNOUSERSITE": "1",
    "PYTHONSAFEPATH": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
TEST_SCRIPT = "/tests/test.sh"


class Put(Value, frozen=True, tag=True):
    files: tuple[PutFile, ...]


class Enter(Value, frozen=True, tag=True):
    """Make and enter the folder; the environment from here on."""

    cwd: str
    env: dict[str, str]


class RunSetup(Value, frozen=True, tag=True):
    """A command of the task's author; it must succeed. `shown` is the Dockerfile's own text."""

    command: str
    shown: str


Action = Put | Enter | RunSetup


def actions(task: Task, files: dict[str, TaskFile]) -> list[Action]:
    """What to do in a fresh box before its first step; the last action is the session's Enter."""
    context = environment_files(files)
    cwd, env = "/", dict(BASE_ENV)
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
                    RunSetup(f"exec /bin/sh -c {shlex.quote(command)}", command),
                ]
    return [*done, Enter(task.workdir, env | dict(task.env))]


def _copies(step: CopyFiles, context: dict[str, TaskFile]) -> tuple[PutFile, ...]:
    return tuple(
        PutFile(target, context[path].mode if step.mode is None else step.mode, context[path].data)
        for path, target in copied(step, context)
    )


def judge_spec(task: Task, files: dict[str, TaskFile], limits: Limits) -> JudgeSpec:
    """How the task's verifier runs: tests/ at /tests, in the task's folder, in a clean room."""
    tests = tuple(
        PutFile("/" + path, file.mode, file.data)
        for path, file in files.items()
        if path.startswith("tests/")
    )
    env = VERIFIER_ENV | dict(task.verifier_env)
    return JudgeSpec(tests, TEST_SCRIPT, task.workdir, env, task.verifier_timeout_s, limits)


def bounded(spec: JudgeSpec, timeout_s_max: float) -> JudgeSpec:
    """The same with the host's bound on a verifier's time."""
    return msgspec.structs.replace(spec, timeout_s=min(spec.timeout_s, timeout_s_max))
