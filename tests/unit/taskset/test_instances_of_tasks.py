"""Tasks with parameters: instances, their names and digests, and what a submission takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.archive import unpack
from muster.errors import InvalidInput
from muster.taskset import (
    fill,
    instantiate,
    pack,
    read_instances,
    read_task,
    read_task_set,
    task_from_archive,
)
from tests.unit.taskset.conftest import MakeTask

TOML = """
[task]
name = "muster/{name}"
[metadata]
muster_split = "{split}"
[metadata.muster_parameters]
file = {{ choice = "words" }}
n = {{ range = [1, 900] }}
"""
CHANGES = {
    "instruction.md": "Write {{n}} to {{file}}.txt.\n",
    "environment/Dockerfile": "FROM x\nWORKDIR /app\nCOPY a.txt {{file}}-old.txt\n",
    "environment/a.txt": "{{n}}\n",
    "tests/test.sh": '[ "$(cat {{file}}.txt)" = {{n}} ] && echo 1 > /logs/verifier/reward.txt\n',
    "solution/solve.sh": "echo {{n}} > {{file}}.txt\n",
}


@pytest.fixture
def fresh(make_task: MakeTask) -> MakeTask:
    """`fresh("name", "split")` → the folder of a task with parameters."""

    def make(name: str = "fresh", split: str = "train") -> Path:
        toml: dict[str, str | None] = {"task.toml": TOML.format(name=name, split=split)}
        return make_task(name, {**CHANGES, **toml})

    return make


def test_an_instance_has_its_values_everywhere_and_its_seed_in_its_name(fresh: MakeTask) -> None:
    folder = fresh()
    task = read_task(folder, seed=17)
    n, file = task.instruction.removeprefix("Write ").removesuffix(".txt.").split(" to ")
    files = unpack(task.archive)
    assert task.name == "muster/fresh@17"
    assert files["environment/a.txt"].data.decode() == f"{n}\n"
    assert f'"$(cat {file}.txt)" = {n} ]' in files["tests/test.sh"].data.decode()
    assert task.build[-1].dst == f"/app/{file}-old.txt"  # type: ignore[union-attr]
    assert fill(folder, "solution/solve.sh", 17) == f"echo {n} > {file}.txt\n"


def test_the_same_seed_gives_the_same_digest_and_another_another(fresh: MakeTask) -> None:
    folder = fresh()
    assert read_task(folder, seed=17) == read_task(folder, seed=17)
    assert read_task(folder, seed=17).digest != read_task(folder, seed=18).digest


def test_without_a_seed_it_is_the_first_of_its_split(fresh: MakeTask) -> None:
    assert read_task(fresh()).name == "muster/fresh@0"
    assert read_task(fresh("kept", "eval")).name == "muster/kept@1000000"


def test_a_seed_leaves_a_task_without_parameters_alone(make_task: MakeTask) -> None:
    folder = make_task(changes={"instruction.md": "Keep {{this}}.\n"})
    assert read_task(folder, seed=5) == read_task(folder)
    assert read_task(folder).instruction == "Keep {{this}}."


def test_a_template_is_no_task(fresh: MakeTask) -> None:
    """It would put `{{n}}` before an agent: whoever packs a folder by hand learns of it."""
    with pytest.raises(InvalidInput, match=r"has no value yet → make an instance"):
        task_from_archive(pack(fresh()))


def test_an_instance_reads_the_same_at_the_other_end(fresh: MakeTask) -> None:
    sent = read_task(fresh(), seed=3)
    assert task_from_archive(sent.archive, name=sent.name) == sent


@pytest.mark.parametrize("name", ["muster/other@3", "muster/fresh@x", "fresh@3", "muster/fresh@"])
def test_only_the_tasks_own_name_can_carry_a_seed(fresh: MakeTask, name: str) -> None:
    sent = read_task(fresh(), seed=3)
    assert task_from_archive(sent.archive, name=name).name == "muster/fresh"


def test_a_parameter_that_no_file_may_name_is_told_with_its_file(make_task: MakeTask) -> None:
    toml = TOML.format(name="hello", split="train")
    folder = make_task(changes={"task.toml": toml, "tests/test.sh": "echo {{nn}}\n"})
    with pytest.raises(InvalidInput, match=r"task hello: no such parameter, used in tests"):
        read_task(folder)


def test_each_group_gets_the_next_instance(fresh: MakeTask, make_task: MakeTask) -> None:
    fresh("b")
    set_ = make_task("a", {"task.toml": None}).parent
    names = [task.name for task in read_instances([set_], seed=40, groups=5)]
    assert names == ["a", "muster/b@40", "a", "muster/b@41", "a"]


def test_a_submission_takes_training_tasks_unless_told(fresh: MakeTask) -> None:
    fresh("held", "eval")
    set_ = fresh("b").parent
    assert [t.name for t in read_task_set(set_, split="train")] == ["muster/b@0"]
    assert [t.name for t in read_task_set(set_, split="eval")] == ["muster/held@1000000"]
    assert len(read_task_set(set_, split="all")) == 2
    evaluated = read_instances([set_], seed=7, groups=2, split="eval")
    assert [t.name for t in evaluated] == ["muster/held@1000007", "muster/held@1000008"]


def test_a_split_without_tasks_says_which_there_are(fresh: MakeTask) -> None:
    with pytest.raises(InvalidInput, match=r"split = 'limits': .* these tasks are of: train; "):
        read_task_set(fresh(), split="limits")
    with pytest.raises(InvalidInput, match=r"not a split → one of train, eval, limits, all"):
        read_task_set(fresh(), split="test")


@pytest.mark.parametrize("seed", [999_999, 1_000_000])
def test_training_cannot_reach_a_held_out_seed(fresh: MakeTask, seed: int) -> None:
    with pytest.raises(InvalidInput, match=r"held out .* → choose 0 to 999998, or --split eval"):
        read_instances([fresh()], seed=seed, groups=2)


@pytest.mark.parametrize("split", ["train", "all"])
def test_a_seed_below_0_is_no_seed(fresh: MakeTask, split: str) -> None:
    with pytest.raises(InvalidInput, match=r"instances = '-1': not a seed → count from 0"):
        read_instances([fresh()], seed=-1, groups=2, split=split)


def test_instances_that_cannot_be_sent_at_once_are_refused(make_task: MakeTask) -> None:
    toml = TOML.format(name="big", split="train")
    folder = make_task("big", {"task.toml": toml, "environment/big.txt": "x" * 1_000_000})
    with pytest.raises(InvalidInput, match=r"over 48 MiB .* submit at most \d\d groups"):
        read_instances([folder], seed=0, groups=100)


def test_no_task_set_is_executed(fresh: MakeTask) -> None:
    """Parameters are data: a rule that is code is refused, whatever it says."""
    folder = fresh()
    (folder / "task.toml").write_text('[metadata.muster_parameters]\nn = "{{__import__(1)}}"\n')
    with pytest.raises(InvalidInput, match="is not a rule"):
        instantiate(pack(folder), seed=0)
