"""How a fresh box of a task is made, under the name of what will be in it. Pure.

Promise: two tasks have the same content exactly when their boxes are made alike; neither name nor
tests nor limits are part of it. Does not cover: running the set-up (adapters/templates.py).
"""

from __future__ import annotations

from muster import dockerfile
from muster.archive import TaskFile
from muster.taskset import Task, environment_files
from muster.types import Value
from services.sandbox import environment
from services.sandbox.environment import Action, Enter


class Setup(Value, frozen=True):
    """How a fresh box of some content is made.

    base: what it stands on; actions: what is done in it, and last of all entering the session;
    context: what an image builder gets, where one runs the Dockerfile; snapshot: whether it is
    done once and kept, since doing it in every box would take longer than starting from a snapshot.
    With a context, the session is what the task says beyond its image: variables of its own, and
    an empty folder where it is the image's.
    """

    content: str
    base: str
    actions: tuple[Action, ...]
    session: Enter
    snapshot: bool
    context: dict[str, TaskFile] = {}


def setup(task: Task, files: dict[str, TaskFile], base: str, *, builds: bool) -> Setup:
    """The set-up of a task; builds: an image builder runs its Dockerfile.

    Raises InvalidInput for an environment that cannot be made here.
    """
    environment.check(task, builds=builds)
    actions = tuple(environment.actions(task, files))
    session = actions[-1]
    if not isinstance(session, Enter):
        raise TypeError("the last action enters the session")
    context: dict[str, TaskFile] = {}
    if builds:
        context = environment_files(files)
        context.setdefault("Dockerfile", TaskFile(0o644, f"FROM {task.base}\n".encode()))
        session = Enter(_own_workdir(task, context), dict(task.env))
        actions = (session,)
    name = environment.content(task, files, base, builds=builds)
    needed = builds or any(not isinstance(action, Enter) for action in actions)
    return Setup(name, base, actions, session, needed, context)


def _own_workdir(task: Task, context: dict[str, TaskFile]) -> str:
    """The task's folder where it says so beside the Dockerfile; else empty: an image builder knows
    better than a reader what a WORKDIR comes to."""
    text = context["Dockerfile"].data.decode("utf-8", "replace")
    return "" if dockerfile.parse(text).workdir == task.workdir else task.workdir
