"""What `muster submit` makes of --split, --instances and --policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.cli.check_plan import tries
from muster.cli.jobs import job_policy
from muster.client import MusterClient
from muster.errors import InvalidInput
from muster.types import JobPolicy
from tests.unit.client.router_double import RouterDouble

TOML = """
[metadata]
muster_split = "{split}"
[metadata.muster_parameters]
n = {{ range = [1, 900] }}
"""


@pytest.fixture
def set_(tmp_path: Path) -> Path:
    """A training task and one for evaluation, both with a parameter."""
    for name, split in (("easy", "train"), ("kept", "eval")):
        folder = tmp_path / name
        for below in ("tests", "environment", "solution"):
            (folder / below).mkdir(parents=True)
        (folder / "instruction.md").write_text("Write {{n}}.\n")
        (folder / "task.toml").write_text(TOML.format(split=split))
        (folder / "tests" / "test.sh").write_text("echo {{n}} > /logs/verifier/reward.txt\n")
        (folder / "environment" / "Dockerfile").write_text("FROM debian\nWORKDIR /app\n")
        (folder / "solution" / "solve.sh").write_text("echo {{n}}\n")
        (folder / "solution" / "wrong.sh").write_text("echo 0\n")
    return tmp_path


async def test_groups_get_instances_and_the_job_its_policy(set_: Path) -> None:
    router = RouterDouble()
    async with router.serving() as server, MusterClient(server.address) as client:
        wanted = JobPolicy(repairs_max=0, zero_variance="train")
        await client.submit(set_, groups=3, group_size=2, instances=5, policy=wanted)
        await client.submit(set_, groups=2, group_size=2, split="eval")
    fresh, evaluated = router.submitted
    assert [package.name for package in fresh.tasks] == ["easy@5", "easy@6", "easy@7"]
    assert len({package.digest for package in fresh.tasks}) == 3
    assert (fresh.policy.repairs_max, fresh.policy.zero_variance) == (0, "train")
    assert fresh.policy.HasField("repairs_max")
    assert not fresh.policy.HasField("valid_min")
    assert [package.name for package in evaluated.tasks] == ["kept@1000000"]


def test_policies_are_read_from_settings() -> None:
    settings = ["repairs_max=3", "valid_min=2", "zero_variance=filter", "infra_ceiling=0.25"]
    assert job_policy(settings) == JobPolicy(3, 2, "filter", 0.25)
    assert job_policy([]) == JobPolicy()


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("repair_max=3", r"not a policy → write repairs_max=VALUE; known are repairs_max, valid"),
        ("valid_min", r"write valid_min=VALUE"),
        ("foo=1", r"write KEY=VALUE; known are repairs_max"),
        ("valid_min=two", r"not a value of that policy: .*int"),
        ("infra_ceiling=", r"infra_ceiling is a share"),
    ],
)
def test_a_wrong_policy_says_what_is_right(setting: str, told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        job_policy([setting])


def test_the_tries_of_an_instance_have_its_values(set_: Path) -> None:
    seventh, eighth = (tries(set_ / "easy", seed)[2].script for seed in (7, 8))
    assert "{{" not in seventh
    assert seventh != eighth
