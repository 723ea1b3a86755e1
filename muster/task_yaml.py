"""The settings of one task in the format of Terminal-Bench 1: task.yaml, docker-compose.yaml.

Owns: which keys exist, what becomes of each, and the defaults; and solution.yaml as a script.
Promise: pure; as in task_toml.py nothing is skipped in silence: unknown keys, doubled keys and
aliases are refused. Does not cover: the other files of a task (task_read.py), its verdict.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from muster.errors import InvalidInput
from muster.task_fields import (
    DESCRIPTIVE,
    HONOURED,
    Field,
    Found,
    Table,
    TaskSettings,
    check_keys,
    without_host_variables,
)

AGENT_TIMEOUT_S, TEST_TIMEOUT_S = 360.0, 60.0  # the format's own, when a task gives none
DIFFICULTIES = ("easy", "medium", "hard", "unknown")
TEST_DIR = "/tests"
SERVICE = "client"
_DEPTH_MAX = 40

FIELDS: dict[str, Field] = {
    "instruction": HONOURED,
    "difficulty": HONOURED,
    **{name: DESCRIPTIVE
       for name in ("author_name", "author_email", "category", "tags", "estimated_duration_sec",
                    "expert_time_estimate_min", "junior_time_estimate_min")},
    "parser_name": HONOURED,
    "max_agent_timeout_sec": HONOURED,
    "max_test_timeout_sec": HONOURED,
    "run_tests_in_same_shell": Field(
        "refused", "the verifier has a box of its own, never the agent's shell",
        "let run-tests.sh judge files; its folder is the last WORKDIR"),
    "disable_asciinema": Field("no effect", "no terminal is recorded here, whatever it says"),
}  # fmt: skip

_SERVICE = Field("refused", "a box is one container, made from the Dockerfile alone",
                 f"leave the service {SERVICE!r} in the format's standard form only")  # fmt: skip
# What the standard file of the format says; anything else in it asks for another container.
COMPOSE_FIELDS: dict[str, Field] = {
    "version": DESCRIPTIVE,
    "name": DESCRIPTIVE,
    "services": HONOURED,
    f"services.{SERVICE}": HONOURED,
    **{f"services.{SERVICE}.{name}": HONOURED
       for name in ("build", "image", "container_name", "command", "environment", "volumes",
                    "network_mode")},
}  # fmt: skip
_COMMANDS = ("sh -c sleep infinity", "bash -c sleep infinity", "sleep infinity")
_LOGS = re.compile(
    r"\$\{(T_BENCH_TASK_LOGS_PATH|T_BENCH_TASK_AGENT_LOGS_PATH)\}:"
    r"\$\{(T_BENCH_CONTAINER_LOGS_PATH|T_BENCH_CONTAINER_AGENT_LOGS_PATH)\}\Z"
)
_KEYS_OF_A_COMMAND = ("command", "min_timeout_sec", "max_timeout_sec", "block", "append_enter")


def parse(text: str) -> TaskSettings:
    """The settings in `text`; InvalidInput names field and way out."""
    settings, found = examine(text)
    if found.refusals:
        raise found.refusals[0]
    return settings


def examine(text: str) -> tuple[TaskSettings, Found]:
    """The settings, with everything that is refused or has no effect; what is wrong is absent."""
    found = Found()
    nothing: dict[str, Any] = {}
    root = found.attempt(lambda: _mapping(text, "task.yaml"), nothing)
    if found.refusals:
        return TaskSettings(), found
    check_keys(root, FIELDS, found, file="task.yaml")
    top = Table(root, "", found)
    for name in ("instruction", "difficulty"):
        if root.get(name) in (None, ""):
            one_of = f"one of {', '.join(DIFFICULTIES)}" if name == "difficulty" else "what to do"
            found.refuse(name, "task.yaml has to say it", f"add {name}: and {one_of}")
    top.choice("difficulty", DIFFICULTIES)
    if root.get("parser_name") not in (None, "pytest"):
        way_out = "let run-tests.sh run pytest -rA, and write parser_name: pytest"
        found.refuse("parser_name", "only pytest's summary can be read", way_out)
    settings = TaskSettings(
        instruction=top.text("instruction") or "",
        agent_timeout_s=top.number("max_agent_timeout_sec") or AGENT_TIMEOUT_S,
        verifier_timeout_s=top.number("max_test_timeout_sec") or TEST_TIMEOUT_S,
        verifier_env=(("TEST_DIR", TEST_DIR),),
    )
    return settings, found


def examine_compose(text: str) -> tuple[tuple[tuple[str, str], ...], Found]:
    """The variables that docker-compose.yaml gives its one container, and what is refused in it."""
    found = Found()
    nothing: dict[str, Any] = {}
    root = found.attempt(lambda: _mapping(text, "docker-compose.yaml"), nothing)
    services = root.get("services")
    if not found.refusals and (not isinstance(services, dict) or set(services) != {SERVICE}):
        names = ", ".join(map(str, services)) if isinstance(services, dict) else "none"
        problem = f"tasks of several containers cannot be run; its services: {names}"
        found.refuse("services", problem, f"keep the one service {SERVICE!r}")
    if found.refusals:
        return (), found
    for key in root:
        if key not in COMPOSE_FIELDS:
            found.refuse(str(key), _SERVICE.why, _SERVICE.way_out)
    client = services[SERVICE] if isinstance(services, dict) else {}
    if not isinstance(client, dict):
        found.refuse(f"services.{SERVICE}", "has to be a mapping", _SERVICE.way_out)
        return (), found
    return _client(client, found), found


def solution_script(text: str) -> str:
    """The commands of solution.yaml as one script; InvalidInput where they are only keystrokes."""
    commands: list[str] = []
    content = _load(text, "solution.yaml")
    for number, step in enumerate(content if isinstance(content, list) else [None], start=1):
        where = f"solution.yaml[{number}]"
        if not isinstance(step, dict) or not isinstance(step.get("command"), str):
            raise _wrong(where, "has to be a list of steps, each with a command", "- command: ls")
        for key in step:
            if key not in _KEYS_OF_A_COMMAND:
                known = ", ".join(_KEYS_OF_A_COMMAND)
                raise _wrong(f"{where}.{key}", "unknown key in solution.yaml", f"known are {known}")
        if step.get("append_enter") is False:
            problem = "keystrokes cannot be tried: there is no terminal"
            raise _wrong(f"{where}.append_enter", problem, "write solution.sh")
        commands.append(step["command"])
    return "\n".join(commands) + "\n"


def _client(client: Mapping[str, Any], found: Found) -> tuple[tuple[str, str], ...]:
    """Notes what is not in the standard form; the variables given."""
    where = f"services.{SERVICE}"
    build, volumes = client.get("build"), client.get("volumes") or []
    build = {"context": build} if isinstance(build, str) else build or {}
    standard = {
        "build": isinstance(build, dict)
        and build.get("dockerfile", "Dockerfile") in ("Dockerfile", "./Dockerfile")
        and build.get("context", ".") in (".", "./")
        and set(build) <= {"dockerfile", "context"},
        "command": _command(client.get("command")) in ("", *_COMMANDS),
        "volumes": isinstance(volumes, list)
        and all(isinstance(one, str) and _LOGS.match(one) for one in volumes),
        "network_mode": client.get("network_mode") in (None, "none"),
    }
    for key in client:
        if f"{where}.{key}" not in COMPOSE_FIELDS or not standard.get(key, True):
            found.refuse(f"{where}.{key}", _SERVICE.why, _SERVICE.way_out)
    return _variables(client.get("environment"), f"{where}.environment", found)


def _command(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value or "")


def _variables(content: object, where: str, found: Found) -> tuple[tuple[str, str], ...]:
    kept: list[tuple[str, str]] = []
    for name, value in _pairs(content, where, found):
        plain = without_host_variables(value)
        if (name, value) == ("TEST_DIR", "${T_BENCH_TEST_DIR}"):
            kept.append((name, TEST_DIR))
        elif plain is None or not re.match(r"[A-Za-z_]\w*\Z", name, re.ASCII):
            problem = "a value from the host's environment is never given to a box"
            found.refuse(f"{where}.{name}", problem, "write the value itself, or ${NAME:-value}")
        else:
            kept.append((name, plain))
    return tuple(sorted(kept))


def _pairs(content: object, where: str, found: Found) -> list[tuple[str, str]]:
    """Names and values; a name without a value stands for the host's variable of that name."""
    if isinstance(content, dict):
        return [
            (str(name), f"${{{name}}}" if value is None else str(value))
            for name, value in content.items()
        ]
    if isinstance(content, list):
        split = [str(one).partition("=") for one in content]
        return [(name, value if equals else f"${{{name}}}") for name, equals, value in split]
    if content is not None:
        found.refuse(where, "has to be a list or a mapping", "write - NAME=value")
    return []


def _mapping(text: str, file: str) -> dict[str, Any]:
    content = _load(text, file)
    if not isinstance(content, dict):
        raise _wrong(file, "has to be a mapping", "write key: value")
    return content


def _load(text: str, file: str) -> Any:
    """The one document of a YAML text, of plain values, without doubled keys and aliases."""
    import yaml  # here, so that nothing that reads no such task has to load it

    try:
        _check_nodes(yaml.compose(text, yaml.SafeLoader), file, set(), 0)
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        problem = f"not readable as YAML: {' '.join(str(error).split())[:200]}"
        raise _wrong(file, problem, "mend it") from None


def _check_nodes(node: Any, file: str, seen: set[int], depth: int) -> None:
    """Aliases multiply what a small file says; of doubled keys one would be skipped in silence."""
    import yaml

    if id(node) in seen or depth > _DEPTH_MAX:
        raise _wrong(file, "aliases (*name) and deep nesting are not read", "write it out")
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_nodes(item, file, seen, depth + 1)
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if doubled := sorted({key for key in keys if keys.count(key) > 1}):
            raise _wrong(f"{file}.{doubled[0]}", "the key is there twice", "remove one")
        for key, value in node.value:
            _check_nodes(key, file, seen, depth + 1)
            _check_nodes(value, file, seen, depth + 1)


def _wrong(field: str, problem: str, way_out: str) -> InvalidInput:
    return InvalidInput(problem, field=field, value=field.rpartition(".")[2], way_out=way_out)
