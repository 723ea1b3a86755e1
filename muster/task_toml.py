"""The settings of one task in Harbor's format: task.toml, schema up to 1.4.

Owns: which keys exist, what becomes of each, and the defaults. Promise: pure; an unknown key is
refused with the nearest known one; what cannot be honoured is refused by name, with its reason.
Does not cover: the other files of a task (task_read.py).

Tasks run without a network. Harbor's default for an absent `network_mode` is "public"; here it
means none, and a task that asks for one is refused.
"""

from __future__ import annotations

import tomllib
from typing import Any

from muster import instances
from muster.errors import InvalidInput
from muster.task_fields import (
    DESCRIPTIVE,
    HONOURED,
    SPLITS,
    Field,
    Found,
    Table,
    TaskSettings,
    check_keys,
)

SCHEMAS = ("1.0", "1.1", "1.2", "1.3", "1.4")
VERIFY = ("sealed", "live")

_ONE_BOX = "an agent works in one box, in one go"
_STEPS = Field("refused", f"{_ONE_BOX}: tasks of several steps cannot be run",
               "write each step as a task of its own")  # fmt: skip
_ARTIFACTS = Field("refused", "files of a box are not collected",
                   "remove it: tests/test.sh sees every file of the box")  # fmt: skip
_COLLECT = Field("refused", "no command runs in the agent's box after its last step",
                 "do it in tests/test.sh, which sees every file of the box")  # fmt: skip
_HEALTH = Field("refused", "a box starts no service of its image, so there is nothing to wait for",
                "let the last RUN line of the Dockerfile check what has to be there")  # fmt: skip
_GPU = Field("refused", "boxes have no accelerator", "write the task for processors")
_MCP = Field("refused", "the agent has a shell and no MCP client",
             "put the tool into the box as a command")  # fmt: skip

# Every key of the format, and the ones of Muster's own in the free table [metadata].
FIELDS: dict[str, Field] = {
    "schema_version": HONOURED,
    "version": HONOURED,
    "source": DESCRIPTIVE,
    "artifacts": _ARTIFACTS,
    "steps": _STEPS,
    **{f"steps[].{name}": _STEPS
       for name in ("name", "agent", "verifier", "min_reward", "healthcheck", "artifacts")},
    "multi_step_reward_strategy": Field("no effect", f"{_ONE_BOX}: there is one reward"),
    "metadata": DESCRIPTIVE,
    "metadata.*": DESCRIPTIVE,
    "metadata.muster_max_turns": HONOURED,
    "metadata.muster_success_threshold": HONOURED,
    "metadata.muster_split": HONOURED,
    "metadata.muster_verify": HONOURED,
    "metadata.muster_parameters": HONOURED,
    "task": HONOURED,
    "task.name": HONOURED,
    **{f"task.{name}": DESCRIPTIVE
       for name in ("version", "description", "authors", "authors[].name", "authors[].email",
                    "keywords")},
    "agent": HONOURED,
    "agent.timeout_sec": HONOURED,
    "agent.user": HONOURED,
    "agent.network_mode": HONOURED,
    "agent.allowed_hosts": HONOURED,
    "verifier": HONOURED,
    "verifier.timeout_sec": HONOURED,
    "verifier.env": HONOURED,
    "verifier.user": HONOURED,
    "verifier.environment_mode": Field(
        "no effect", "the verifier always has a box of its own, over all files of the agent's "
        "(metadata.muster_verify chooses another)"),
    "verifier.environment": Field(
        "refused", "the verifier's box is made from the same image as the agent's",
        "put what it needs into environment/Dockerfile or tests/"),
    "verifier.collect": _COLLECT,
    **{f"verifier.collect[].{name}": _COLLECT
       for name in ("command", "service", "timeout_sec", "user")},
    "verifier.network_mode": HONOURED,
    "verifier.allowed_hosts": HONOURED,
    "environment": HONOURED,
    "environment.build_timeout_sec": Field(
        "no effect", "the host's sandbox.setup_timeout_s bounds each RUN line"),
    "environment.docker_image": HONOURED,
    "environment.os": HONOURED,
    "environment.cpus": HONOURED,
    "environment.memory_mb": HONOURED,
    "environment.memory": HONOURED,
    "environment.storage_mb": HONOURED,
    "environment.storage": HONOURED,
    "environment.gpus": _GPU,
    "environment.gpu_types": _GPU,
    "environment.tpu": _GPU,
    "environment.mcp_servers": _MCP,
    "environment.env": HONOURED,
    "environment.skills_dir": Field(
        "refused", "the agent has a shell and reads no skills", "copy them into the box, and name "
        "the folder in instruction.md"),
    "environment.workdir": HONOURED,
    "environment.network_mode": HONOURED,
    "environment.allowed_hosts": HONOURED,
    "environment.allow_internet": HONOURED,
    "environment.healthcheck": _HEALTH,
    **{f"environment.healthcheck.{name}": _HEALTH
       for name in ("command", "interval", "timeout", "start_period", "start_interval",
                    "retries")},
    "solution": HONOURED,
    "solution.env": HONOURED,
}  # fmt: skip


def parse(text: str) -> TaskSettings:
    """The settings in `text` (empty text: the defaults); InvalidInput names field and way out."""
    settings, found = examine(text)
    if found.refusals:
        raise found.refusals[0]
    return settings


def examine(text: str) -> tuple[TaskSettings, Found]:
    """The settings, with everything that is refused or has no effect; what is wrong is absent."""
    found = Found()
    try:
        root: dict[str, Any] = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        problem = f"not readable as TOML: {error}"
        found.refusals.append(
            InvalidInput(problem, field="task.toml", value="task.toml", way_out="mend it")
        )
        return TaskSettings(), found
    check_keys(root, FIELDS, found, file="task.toml")
    top = Table(root, "", found)
    tables = ("metadata", "task", "agent", "verifier", "environment", "solution")
    metadata, task, agent, verifier, environment, solution = (
        Table(root.get(name), name, found) for name in tables
    )
    _check_schema(top)
    top.choice("multi_step_reward_strategy", ("mean", "final"))
    verifier.choice("environment_mode", ("shared", "separate"))
    _check_user(agent)
    _check_user(verifier)
    environment.choice("os", ("linux",))
    for table in (agent, verifier, environment):
        _check_offline(table)
    parameters = metadata.raw("muster_parameters")
    settings = TaskSettings(
        name=task.text("name") or "",
        agent_timeout_s=agent.number("timeout_sec"),
        verifier_timeout_s=verifier.number("timeout_sec") or 600.0,
        success_threshold=metadata.number("muster_success_threshold", top=1.0) or 1.0,
        max_turns=metadata.whole("muster_max_turns", top=1000),
        workdir=_workdir(environment),
        env=environment.env(),
        verifier_env=verifier.env(),
        solution_env=solution.env(),
        memory_bytes=_size(environment, "memory_mb", "memory"),
        disk_bytes=_size(environment, "storage_mb", "storage"),
        cpus=environment.number("cpus", top=1024.0),
        image=environment.text("docker_image") or "",
        split=metadata.choice("muster_split", SPLITS) or SPLITS[0],
        verify=metadata.choice("muster_verify", VERIFY) or VERIFY[0],
        parameters=found.attempt(lambda: instances.parse(parameters or {}), ()),
    )
    return settings, found


def _check_schema(top: Table) -> None:
    now, older = top.raw("schema_version"), top.raw("version")
    if now is not None and older is not None and str(now) != str(older):
        top.refuse("version", "schema_version says something else", "write schema_version only")
    version = now if now is not None else older
    if version is not None and str(version) not in SCHEMAS:
        way_out = f"write one of {', '.join(SCHEMAS)}"
        top.refuse("schema_version", f"schema {version} is not known", way_out)


def _check_user(table: Table) -> None:
    if table.raw("user") not in (None, "", "root", 0, "0"):
        table.refuse("user", "a box has the user root only", "remove it")


def _check_offline(table: Table) -> None:
    needs = "and put what it needs into a base or below environment/"
    if table.raw("network_mode") not in (None, "no-network"):
        way_out = f'write network_mode = "no-network", {needs}'
        table.refuse("network_mode", "boxes have no network", way_out)
    for key, nothing in (("allowed_hosts", "[]"), ("allow_internet", "false")):
        if table.raw(key):
            table.refuse(key, "boxes have no network", f"write {key} = {nothing}, {needs}")


def _workdir(environment: Table) -> str | None:
    value = environment.text("workdir")
    if value and (not value.startswith("/") or ".." in value.split("/")):
        problem = f"{value!r} is not an absolute path"
        environment.refuse("workdir", problem, "write a path such as /app")
        return None
    return value or None


def _size(environment: Table, key: str, old_key: str) -> int | None:
    megabytes = environment.whole(key, top=1 << 20)
    now = None if megabytes is None else megabytes << 20
    older = _older_size(environment, key, old_key)
    if now is not None and older not in (None, now):
        environment.refuse(old_key, f"{key} says something else", f"write {key} only")
    return older if now is None else now


def _older_size(environment: Table, key: str, old_key: str) -> int | None:
    text = environment.text(old_key)
    if not text:
        return None
    units = {"K": 10, "M": 20, "G": 30}
    number, unit = text[:-1], text[-1].upper()
    if unit not in units or not number.isdecimal() or not 0 < int(number[:12]) <= 1 << 30:
        environment.refuse(old_key, f"{text!r} is not a size", f"write {key} = 512")
        return None
    return int(number) << units[unit]
