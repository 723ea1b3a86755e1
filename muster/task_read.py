"""What a task is once read, from the files of its archive. Pure.

Owns: `Task`, and every reason to refuse one. Promise: a setting that could change the task's
meaning is honoured or refused by name, never skipped; what is accepted without effect is told by
`examine`. Does not cover: folders and instances (taskset.py), building and judging (the sandbox).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

import msgspec

from muster import dockerfile, instances, task_toml, task_yaml
from muster.archive import BENCH, TaskFile, unpack
from muster.dockerfile import BuildStep, CopyFiles, Recipe, copied
from muster.errors import InvalidInput
from muster.task_fields import Found, TaskSettings
from muster.types import Value

INSTRUCTION_BYTES_MAX = 32 << 10
_CONTEXT = "environment/"
_COMPOSE = tuple(
    f"{name}.{ending}" for name in ("docker-compose", "compose") for ending in ("yaml", "yml")
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}(/[A-Za-z0-9][A-Za-z0-9._-]{0,63})?\Z")


class Task(Value, frozen=True):
    """One task, ready to travel. Times in seconds; None leaves the choice to the configuration."""

    name: str
    instruction: str
    digest: str  # sha256 of `archive`, hexadecimal
    archive: bytes
    workdir: str
    build: tuple[BuildStep, ...]
    env: tuple[tuple[str, str], ...] = ()  # of the box, over the Dockerfile's
    verifier_env: tuple[tuple[str, str], ...] = ()
    agent_timeout_s: float | None = None
    verifier_timeout_s: float = 600.0
    success_threshold: float = 1.0
    max_turns: int | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    split: str = "train"
    cpus: float | None = None
    base: str = ""  # the image that FROM names, or environment.docker_image
    verify: str = "sealed"  # or "live": beside the agent's living processes
    test_script: str = "tests/test.sh"  # its path in the archive; below / in the verifier's box
    verdict: str = "files"  # or "pytest": read from the summary that the script prints
    unbuildable: str = ""  # what only an image builder can do with the Dockerfile; `build` is empty


def task_from_archive(archive: bytes, *, name: str = "task") -> Task:
    """The task packed in `archive`, as it is.

    name: used when its task.toml gives none, or when it is that name with `@SEED` after it.
    """
    files = unpack(archive)
    settings, found = settings_of(files)
    if found.refusals:
        raise found.refusals[0]
    bench = BENCH in files
    script = "tests/run-tests.sh" if bench else "tests/test.sh"
    if script not in files:
        raise _no_tests(bench)
    instruction = settings.instruction if bench else _text(files, "instruction.md")
    if not instruction.strip():
        way_out = "add instruction.md, which tells the agent what to do"
        raise _refusal("the task has no instruction", "instruction.md", way_out)
    _check_filled(files, settings.parameters)
    recipe = recipe_of(files, settings)
    return Task(
        name=_resolved_name(settings.name, name),
        instruction=instruction.strip(),
        digest=hashlib.sha256(archive).hexdigest(),
        archive=archive,
        workdir=settings.workdir or recipe.workdir,
        build=recipe.steps,
        env=settings.env,
        verifier_env=settings.verifier_env,
        agent_timeout_s=settings.agent_timeout_s,
        verifier_timeout_s=settings.verifier_timeout_s,
        success_threshold=settings.success_threshold,
        max_turns=settings.max_turns,
        memory_bytes=settings.memory_bytes,
        disk_bytes=settings.disk_bytes,
        split=settings.split,
        cpus=settings.cpus,
        base=recipe.base,
        verify=settings.verify,
        test_script=script,
        verdict="pytest" if bench else "files",
        unbuildable=recipe.unbuildable,
    )


def settings_of(files: Mapping[str, TaskFile]) -> tuple[TaskSettings, Found]:
    """What task.toml says, or task.yaml and docker-compose.yaml; and what is refused in them."""
    compose = [name for name in _COMPOSE if _CONTEXT + name in files]
    if BENCH not in files:
        settings, found = task_toml.examine(_text(files, "task.toml"))
        for name in compose:
            problem, way_out = "tasks of several containers cannot be run", "describe one container"
            found.refuse(_CONTEXT + name, problem, f"{way_out} with environment/Dockerfile")
        return settings, found
    settings, found = task_yaml.examine(_text(files, BENCH))
    for name in compose:
        env, also = task_yaml.examine_compose(_text(files, _CONTEXT + name))
        found.refusals += also.refusals
        settings = msgspec.structs.replace(settings, env=env)
    return settings, found


def recipe_of(files: Mapping[str, TaskFile], settings: TaskSettings) -> Recipe:
    """How the box is made. A Dockerfile stands before environment.docker_image, which is then the
    prebuilt image of just that file."""
    recipe, refusals = examine_recipe(files, settings)
    if refusals:
        raise refusals[0]
    return recipe


def examine_recipe(
    files: Mapping[str, TaskFile], settings: TaskSettings
) -> tuple[Recipe, list[InvalidInput]]:
    """The same with all that is refused in it."""
    context = environment_files(files)
    shown = "Dockerfile" if BENCH in files else dockerfile.FILE
    if "Dockerfile" not in context:
        way_out = f"add {shown} (FROM, WORKDIR, COPY, RUN are enough)"
        if BENCH not in files:
            way_out += ", or name the image in task.toml: [environment] docker_image"
        return Recipe("", ()), [_refusal(f"the task has no {shown}", shown, way_out)]
    try:
        text = _decoded(context["Dockerfile"], shown, 1 << 16)
    except InvalidInput as error:
        return Recipe("", ()), [error]
    recipe, refusals = dockerfile.examine(text, shown)
    ignored = context.get(".dockerignore")
    if ignored and any(line.strip() for line in ignored.data.splitlines()):
        why = f"{shown} line 1: only an image builder follows the .dockerignore beside it"
        recipe = Recipe(recipe.base, (), recipe.workdir, recipe.unbuildable or why)
    for step, number in zip(recipe.steps, recipe.lines, strict=True):
        if isinstance(step, CopyFiles):
            try:
                copied(step, context)  # a missing file is told now, not in a box later
            except InvalidInput as error:
                error.field = f"{shown} line {number}"
                refusals.append(error)
    return recipe, refusals


def environment_files(files: Mapping[str, TaskFile]) -> dict[str, TaskFile]:
    """The files beside the Dockerfile, by their path there: what COPY can see.

    Of a task that names its image only, the Dockerfile that says just that.
    """
    context = {
        path[len(_CONTEXT) :]: file for path, file in files.items() if path.startswith(_CONTEXT)
    }
    if "Dockerfile" not in context and BENCH not in files:
        image = task_toml.examine(_text(files, "task.toml"))[0].image
        if image:
            context["Dockerfile"] = TaskFile(0o644, f"FROM {image}\n".encode())
    return context


def checked_name(name: str) -> str:
    """The name, if it can stand in keys and paths."""
    if not _NAME.match(name):
        way_out = "use letters, digits, '.', '_' and '-', at most one '/': for example team/my-task"
        raise InvalidInput(
            "not usable as a task name", field="task.name", value=name, way_out=way_out
        )
    return name


def _no_tests(bench: bool) -> InvalidInput:
    problem = "so nothing could judge it"
    if bench:
        way_out = "add run-tests.sh, which runs pytest -rA on the files of $TEST_DIR"
        return _refusal(f"the task has no run-tests.sh, {problem}", "run-tests.sh", way_out)
    way_out = "add tests/test.sh, which writes a number from 0 to 1 to /logs/verifier/reward.txt"
    return _refusal(f"the task has no tests/test.sh, {problem}", "tests/test.sh", way_out)


def _text(files: Mapping[str, TaskFile], path: str) -> str:
    """The content of a file that may be absent."""
    return _decoded(files[path], path, INSTRUCTION_BYTES_MAX) if path in files else ""


def _decoded(file: TaskFile, path: str, limit: int) -> str:
    if len(file.data) > limit:
        raise _refusal(f"{path} is over {limit} bytes", path, "make it shorter")
    try:
        return file.data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _refusal(f"{path} is not UTF-8: {error.reason}", path, "save it as UTF-8") from None


def _resolved_name(own: str, given: str) -> str:
    """The task's own name, with the seed that the given one may carry."""
    base, at, seed = given.partition("@")
    if at and (own or base) == base and seed.isdecimal() and len(seed) <= 10:
        return f"{checked_name(base)}@{seed}"
    return checked_name(own or given)


def _check_filled(files: Mapping[str, TaskFile], parameters: Sequence[instances.Parameter]) -> None:
    """A template must not reach an agent as if it were a task."""
    for path, file in files.items():
        text = file.data.decode("utf-8", "replace")
        if path != "task.toml" and parameters and instances.mentions(text, parameters):
            way_out = "make an instance of it: muster.taskset.instantiate(archive, seed=0)"
            raise _refusal("a parameter of the task has no value yet", path, way_out)


def _refusal(problem: str, path: str, way_out: str) -> InvalidInput:
    return InvalidInput(problem, field="task", value=path, way_out=way_out)
