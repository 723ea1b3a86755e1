"""Every key of both formats: documented, honoured or refused, and shown by a task of our own."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from muster import task_toml, task_yaml
from muster.cli.check_plan import plan
from muster.task_fields import Field
from muster.taskset import examine, read_task_set, task_folders

ROOT = Path(__file__).parents[3]
FORMATS = ROOT / "tests" / "tasks_formats"
HARBOR, BENCH = FORMATS / "harbor-all", FORMATS / "tb1-all"

# The formats as they are published; what Muster adds to them is not here.
HARBOR_KEYS = """
schema_version version source artifacts steps multi_step_reward_strategy metadata metadata.*
task task.name task.version task.description task.authors task.authors[].name task.authors[].email
task.keywords
agent agent.timeout_sec agent.user agent.network_mode agent.allowed_hosts
verifier verifier.timeout_sec verifier.env verifier.user verifier.environment_mode
verifier.environment verifier.collect verifier.collect[].command verifier.collect[].service
verifier.collect[].timeout_sec verifier.collect[].user verifier.network_mode verifier.allowed_hosts
environment environment.build_timeout_sec environment.docker_image environment.os environment.cpus
environment.memory_mb environment.storage_mb environment.gpus environment.gpu_types environment.tpu
environment.mcp_servers environment.env environment.skills_dir environment.workdir
environment.network_mode environment.allowed_hosts environment.healthcheck
environment.healthcheck.command environment.healthcheck.interval environment.healthcheck.timeout
environment.healthcheck.start_period environment.healthcheck.start_interval
environment.healthcheck.retries environment.memory environment.storage environment.allow_internet
solution solution.env
steps[].name steps[].agent steps[].verifier steps[].min_reward steps[].healthcheck steps[].artifacts
""".split()
BENCH_KEYS = """
instruction difficulty author_name author_email category tags parser_name max_agent_timeout_sec
max_test_timeout_sec run_tests_in_same_shell disable_asciinema estimated_duration_sec
expert_time_estimate_min junior_time_estimate_min
""".split()


def documented(heading: str) -> dict[str, str]:
    """Key → what happens, of the table below a heading of docs/tasks.md."""
    text = (ROOT / "docs" / "tasks.md").read_text("utf-8")
    part = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.split("|") for line in part.splitlines() if line.startswith("| `")]
    keys = [(key, row[2].strip()) for row in rows for key in re.findall(r"`([^`]+)`", row[1])]
    assert len(keys) == len(dict(keys)), "a key is there twice"
    return dict(keys)


def keys_of(content: Any, fields: dict[str, Field], prefix: str = "") -> set[str]:
    """The known keys that a settings file uses, by dotted name."""
    if isinstance(content, list):
        return set().union(*(keys_of(one, fields, f"{prefix[:-1]}[].") for one in content))
    if not isinstance(content, dict):
        return set()
    used = {prefix + key for key in content} & set(fields)
    return used.union(
        *(keys_of(value, fields, f"{prefix}{key}.") for key, value in content.items())
    )


def used_keys(set_: Path, file: str, fields: dict[str, Field]) -> set[str]:
    loads = tomllib.loads if file.endswith(".toml") else yaml.safe_load
    found = [keys_of(loads(path.read_text("utf-8")), fields) for path in set_.rglob(file)]
    assert found
    return set().union(*found)


@pytest.mark.parametrize(
    ("published", "fields"), [(HARBOR_KEYS, task_toml.FIELDS), (BENCH_KEYS, task_yaml.FIELDS)]
)
def test_every_published_key_is_known_and_no_other(
    published: list[str], fields: dict[str, Field]
) -> None:
    assert {key for key in fields if not key.startswith("metadata.muster_")} == set(published)


@pytest.mark.parametrize(
    ("heading", "fields"),
    [("task.toml", task_toml.FIELDS), ("Terminal-Bench 1", task_yaml.FIELDS)],
)
def test_the_page_says_of_every_key_what_happens(heading: str, fields: dict[str, Field]) -> None:
    assert documented(heading) == {key: field.use for key, field in fields.items()}


@pytest.mark.parametrize(
    ("set_", "file", "fields"),
    [(HARBOR, "task.toml", task_toml.FIELDS), (BENCH, "task.yaml", task_yaml.FIELDS)],
)
def test_our_own_tasks_of_each_format_use_every_key(
    set_: Path, file: str, fields: dict[str, Field]
) -> None:
    assert set(fields) - used_keys(set_, file, fields) - {"metadata.*"} == set()


@pytest.mark.parametrize("set_", [HARBOR, BENCH])
def test_those_that_can_be_run_are_read_and_have_all_their_tries(set_: Path) -> None:
    planned = plan(set_, 1)
    assert not planned.refused
    assert len(planned.work) == 3 * len(task_folders(set_))
    assert {task.split for task in read_task_set(set_)} == {"train"}


@pytest.mark.parametrize(
    ("set_", "fields"), [(HARBOR, task_toml.FIELDS), (BENCH, task_yaml.FIELDS)]
)
def test_every_key_that_is_refused_is_so_by_name_with_its_reason(
    set_: Path, fields: dict[str, Field]
) -> None:
    told = {
        refusal.field: refusal for refusal in examine(set_ / "_refused" / "everything").refusals
    }
    tops = {key for key in fields if not re.search(r"\[\]|healthcheck\.", key)}
    refused = {key for key in tops if fields[key].use == "refused"}
    assert refused
    for key in refused:
        assert told[key].problem == fields[key].why
        assert told[key].way_out == fields[key].way_out


@pytest.mark.parametrize(
    ("set_", "name", "fields"),
    [(HARBOR, "everything", task_toml.FIELDS), (BENCH, "everything", task_yaml.FIELDS)],
)
def test_every_key_without_effect_is_remarked(
    set_: Path, name: str, fields: dict[str, Field]
) -> None:
    remarked = {remark.field for remark in examine(set_ / name).remarks}
    assert {key for key, field in fields.items() if field.use == "no effect"} <= remarked
