"""The settings of one task: Harbor's task.toml, schema up to 1.4.

Owns: which keys exist, which can be honoured here, and the defaults. Promise: pure; an unknown
key is an error that names the nearest known one; what cannot be honoured is refused by name.
Does not cover: the other files of a task (taskset.py).

Tasks run without a network. Harbor's default for an absent `network_mode` is "public"; here it
means none, and a task that asks for one is refused.
"""

from __future__ import annotations

import difflib
import tomllib
from typing import Any

from muster import instances
from muster.errors import InvalidInput
from muster.types import Value

SCHEMAS = ("1.0", "1.1", "1.2", "1.3", "1.4")

_NETWORK = {"network_mode", "allowed_hosts"}
_KNOWN: dict[str, set[str]] = {
    "": {
        "schema_version", "version", "source", "artifacts", "steps", "multi_step_reward_strategy",
        "metadata", "task", "agent", "verifier", "environment", "solution",
    },
    "task": {"name", "version", "description", "authors", "keywords"},
    "agent": {"timeout_sec", "user"} | _NETWORK,
    "verifier": {"timeout_sec", "env", "user", "environment_mode", "environment", "collect"}
    | _NETWORK,
    "environment": {
        "build_timeout_sec", "docker_image", "os", "cpus", "memory_mb", "storage_mb", "gpus",
        "gpu_types", "tpu", "mcp_servers", "env", "skills_dir", "workdir", "healthcheck",
        "memory", "storage", "allow_internet",
    }
    | _NETWORK,
    "solution": {"env"},
}  # fmt: skip
# Ours, in the free table [metadata]; any other key there is the author's own.
_OURS = {"muster_max_turns", "muster_success_threshold", "muster_split", "muster_parameters"}
SPLITS = ("train", "eval", "limits")
# Keys that would change what the task means and that a native box cannot honour: any value set
# other than those that mean "nothing" is refused.
_UNABLE = {
    "": ("steps", "artifacts"),
    "verifier": ("collect", "environment"),
    "environment": ("docker_image", "gpus", "gpu_types", "tpu", "mcp_servers", "skills_dir",
                    "healthcheck"),
}  # fmt: skip


class TaskSettings(Value, frozen=True):
    """What task.toml says, checked. Seconds and bytes; None where it says nothing."""

    name: str = ""
    agent_timeout_s: float | None = None
    verifier_timeout_s: float = 600.0
    success_threshold: float = 1.0
    max_turns: int | None = None
    workdir: str | None = None
    env: tuple[tuple[str, str], ...] = ()
    verifier_env: tuple[tuple[str, str], ...] = ()
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    split: str = SPLITS[0]
    parameters: tuple[instances.Parameter, ...] = ()


def parse(text: str) -> TaskSettings:
    """The settings in `text` (empty text: the defaults); InvalidInput names field and way out."""
    try:
        root = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _refusal("", "task.toml", f"not readable as TOML: {error}", "mend it") from None
    _check_keys(root)
    _check_schema(root)
    _check_unable(root)
    _check_offline(root)
    metadata, environment = root.get("metadata", {}), root.get("environment", {})
    agent, verifier = root.get("agent", {}), root.get("verifier", {})
    threshold = _number(metadata, "metadata", "muster_success_threshold", top=1.0)
    verifier_timeout_s = _number(verifier, "verifier", "timeout_sec")
    return TaskSettings(
        name=_string(root.get("task", {}), "task", "name") or "",
        agent_timeout_s=_number(agent, "agent", "timeout_sec"),
        verifier_timeout_s=600.0 if verifier_timeout_s is None else verifier_timeout_s,
        success_threshold=1.0 if threshold is None else threshold,
        max_turns=_whole(metadata, "metadata", "muster_max_turns"),
        workdir=_workdir(environment),
        env=_env(environment, "environment"),
        verifier_env=_env(verifier, "verifier"),
        memory_bytes=_size(environment, "memory_mb", "memory"),
        disk_bytes=_size(environment, "storage_mb", "storage"),
        split=_split(metadata),
        parameters=instances.parse(metadata.get("muster_parameters", {})),
    )


def _check_keys(root: dict[str, Any]) -> None:
    for table, known in _KNOWN.items():
        content = root.get(table, {}) if table else root
        if not isinstance(content, dict):
            raise _refusal("", table, "has to be a table", f"write [{table}]")
        for key in content:
            if key not in known:
                raise _unknown(table, key, known)
    metadata = root.get("metadata", {})
    if not isinstance(metadata, dict):
        raise _refusal("", "metadata", "has to be a table", "write [metadata]")
    for key in metadata:
        if key.startswith("muster_") and key not in _OURS:
            raise _unknown("metadata", key, _OURS)


def _unknown(table: str, key: str, known: set[str]) -> InvalidInput:
    near = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.5)
    way_out = f"did you mean {near[0]!r}?" if near else f"known are: {', '.join(sorted(known))}"
    return _refusal(table, key, "unknown key in task.toml", way_out)


def _check_schema(root: dict[str, Any]) -> None:
    version = str(root.get("schema_version", root.get("version", SCHEMAS[-1])))
    if version not in SCHEMAS:
        way_out = f"write one of {', '.join(SCHEMAS)}"
        raise _refusal("", "schema_version", f"schema {version} is not known", way_out)


def _check_unable(root: dict[str, Any]) -> None:
    for table, keys in _UNABLE.items():
        content = root.get(table, {}) if table else root
        for key in keys:
            if content.get(key) not in (None, "", 0, [], {}):
                way_out = "remove it, or write the task for one box"
                raise _refusal(table, key, "cannot be honoured in a native box", way_out)
    for table in ("agent", "verifier"):
        user = root.get(table, {}).get("user")
        if user not in (None, "", "root", 0, "0"):
            raise _refusal(table, "user", "a box has the user root only", "remove it")
    if root.get("environment", {}).get("os", "linux") != "linux":
        raise _refusal("environment", "os", "boxes are Linux", 'write os = "linux"')


def _check_offline(root: dict[str, Any]) -> None:
    way_out = 'write network_mode = "no-network", and put what it needs below environment/'
    for table in ("agent", "verifier", "environment"):
        content = root.get(table, {})
        if content.get("network_mode") not in (None, "no-network"):
            raise _refusal(table, "network_mode", "boxes have no network", way_out)
        if content.get("allowed_hosts"):
            raise _refusal(table, "allowed_hosts", "boxes have no network", way_out)
    if root.get("environment", {}).get("allow_internet"):
        raise _refusal("environment", "allow_internet", "boxes have no network", way_out)


def _number(content: dict[str, Any], table: str, key: str, *, top: float = 86400.0) -> float | None:
    value = content.get(key)
    if value is None:
        return None
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value <= top:
        problem = f"{value!r} is not a number above 0 and up to {top:g}"
        raise _refusal(table, key, problem, "write such a number")
    return float(value)


def _whole(content: dict[str, Any], table: str, key: str) -> int | None:
    value = _number(content, table, key, top=1000.0)
    if value is not None and value != int(value):
        raise _refusal(table, key, f"{value!r} is not a whole number", "write a whole number")
    return None if value is None else int(value)


def _string(content: dict[str, Any], table: str, key: str) -> str | None:
    value = content.get(key)
    if value is not None and not isinstance(value, str):
        raise _refusal(table, key, f"{value!r} is not text", "put it in quotes")
    return value


def _split(metadata: dict[str, Any]) -> str:
    split = metadata.get("muster_split", SPLITS[0])
    if split not in SPLITS:
        way_out = f"write one of {', '.join(SPLITS)}"
        raise _refusal("metadata", "muster_split", f"{split!r} is not a split", way_out)
    return str(split)


def _workdir(environment: dict[str, Any]) -> str | None:
    value = _string(environment, "environment", "workdir")
    if value and (not value.startswith("/") or ".." in value.split("/")):
        problem = f"{value!r} is not an absolute path"
        raise _refusal("environment", "workdir", problem, "write a path such as /app")
    return value or None


def _env(content: dict[str, Any], table: str) -> tuple[tuple[str, str], ...]:
    env = content.get("env", {})
    if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
        raise _refusal(table, "env", "has to be a table of texts", 'write env = {NAME = "value"}')
    for name, value in env.items():
        if "${" in value:  # Harbor fills these from the host, whose variables no box may see
            problem = "a value from the host's environment is never given to a box"
            raise _refusal(f"{table}.env", name, problem, "write the value itself")
    return tuple(sorted(env.items()))


def _size(environment: dict[str, Any], key: str, old_key: str) -> int | None:
    megabytes = _whole_mb(environment, key)
    if megabytes is not None:
        return megabytes << 20
    text = _string(environment, "environment", old_key)
    if not text:
        return None
    units = {"K": 10, "M": 20, "G": 30}
    number, unit = text[:-1], text[-1].upper()
    if unit not in units or not number.isdecimal():
        problem = f"{text!r} is not a size"
        raise _refusal("environment", old_key, problem, f"write {key} = 512")
    return int(number) << units[unit]


def _whole_mb(environment: dict[str, Any], key: str) -> int | None:
    value = environment.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= 1 << 20:
        raise _refusal(
            "environment", key, f"{value!r} is not a count of MB", "write a whole number"
        )
    return value


def _refusal(table: str, key: str, problem: str, way_out: str) -> InvalidInput:
    field = f"{table}.{key}" if table else key
    return InvalidInput(problem, field=field, value=key, way_out=way_out)
