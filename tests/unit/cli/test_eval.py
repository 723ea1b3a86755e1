"""`muster eval`: what is asked for, what is kept, what a checkpoint is held against."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from muster.cli.evaluating import (
    EvalOptions,
    checked,
    model_config,
    one_or_the_other,
    told,
    trained_with,
    write,
)
from muster.cli.jobs import Where
from muster.cli.screen import fell_short, summary
from muster.cli.settings import read_config
from muster.client import JobState, Progress
from muster.errors import ConfigError, InvalidInput
from muster.evaluation import Training
from muster.evaluation_doubts import compared
from muster.tracking_files import Tracked
from muster.types import Purpose, SamplingParams
from tests.unit.cli.test_tasks_submit import set_ as set_
from tests.unit.evaluation.test_doubts import ASKED, HERE, found


def test_temperature_zero_is_greedy() -> None:
    assert EvalOptions(None, temperature=0.0).sampling == SamplingParams(1.0, top_k=1)
    asked = EvalOptions(None, temperature=0.6, top_p=0.9).sampling
    assert asked == SamplingParams(0.6, 0.9, 0)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"samples": 0}, "group_size"),
        ({"rounds": 0}, "--rounds"),
        ({"temperature": 3.0}, "sampling.temperature"),
        ({"split": "none"}, "split"),
    ],
)
def test_what_is_wrong_is_told_before_anything_runs(
    set_: Path, wrong: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        checked(replace(EvalOptions(set_), **wrong))
    assert refused.value.field == field


def test_the_result_is_kept_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    out.write_text("former")
    assert told(found(), out, as_json=True) == 0
    kept = json.loads(out.read_text())
    assert (kept["format"], kept["overall"]["pass_rate"]) == (1, 0.5)
    assert kept["tasks"][0]["pass_interval"].keys() == {"low", "high"}
    assert kept["serving"][0]["fingerprint"]["dtype"] == "bfloat16"
    with pytest.raises(InvalidInput, match="name a file in a folder"):
        write(tmp_path / "none" / "result.json", found())
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize("job", ["", "held"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(
    set_: Path, tmp_path: Path, job: str
) -> None:
    for out in (tmp_path / "none" / "result.json", tmp_path):
        with pytest.raises(InvalidInput, match="cannot be written") as refused:
            checked(EvalOptions(set_, job=job, out=out))
        assert refused.value.field == "--out"
    checked(EvalOptions(set_, job=job, out=tmp_path / "result.json"))


def test_a_result_that_cannot_be_written_was_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InvalidInput, match="cannot be written"):
        told(found(), tmp_path / "gone" / "result.json", as_json=True)
    assert '"pass_rate"' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("field", "options", "where"),
    [
        ("--job", EvalOptions(None, job="held"), Where()),
        ("--router", EvalOptions(None), Where(router="h:1")),
        ("--state-dir", EvalOptions(None), Where(state_dir=Path(".muster"))),
    ],
)
def test_a_model_of_its_own_and_running_services_are_not_named_together(
    field: str, options: EvalOptions, where: Where
) -> None:
    with pytest.raises(InvalidInput, match="which running services") as refused:
        one_or_the_other(options, where)
    assert refused.value.field == field
    one_or_the_other(EvalOptions(None), Where(config=Path("muster.toml")))


def test_a_result_that_is_not_whole_is_no_success() -> None:
    partial = found(asked=replace(ASKED, groups=2, state="cancelled"))
    assert told(partial, None, as_json=True) == 1


def test_a_checkpoint_is_held_against_the_run_that_wrote_it(tmp_path: Path) -> None:
    trained = Training("t", SamplingParams(1.0), (replace(HERE, dtype="float32"),))
    Tracked(tmp_path / "tracking" / "main").served(trained)
    folder = tmp_path / "checkpoints" / "main" / "step-000002"
    folder.mkdir(parents=True)
    assert trained_with(folder, tmp_path / "elsewhere") == Training()
    (folder / "meta.json").write_text('{"run": "main", "step": 2}')
    assert trained_with(folder, tmp_path / "elsewhere") == trained  # by where the checkpoint lies
    warned = compared(found(training=Training()), trained_with(folder, tmp_path))
    assert warned.warnings == (
        "sampling differs from training: temperature: 0.6 here, 1 there",
        "served otherwise than in training: dtype: bfloat16, float32 (replica r0 first)",
    )


def test_a_model_is_evaluated_in_a_run_of_its_own(tmp_path: Path) -> None:
    config = read_config(None, state_dir=tmp_path)
    one, other = (model_config(config, tmp_path) for _ in range(2))
    assert one.state_dir == tmp_path / "eval"
    assert one.model.path == str(tmp_path)
    assert one.run != other.run != config.run
    with pytest.raises(ConfigError, match="no such folder"):
        model_config(config, tmp_path / "none")


def test_an_evaluations_job_is_told_as_one_and_fell_short_of_nothing() -> None:
    counts = dict.fromkeys(("groups_opened", "groups_complete", "groups_trained"), 0)
    progress = Progress(
        job="v",
        state=JobState.DONE,
        groups_total=3,
        groups_filtered=0,
        episodes_running=0,
        episodes_finished=6,
        turns=9,
        repairs=0,
        outcomes={},
        policy_version=0,
        waiting_for="",
        groups_evaluated=3,
        purpose=Purpose.EVALUATE,
        **counts,
    )
    assert summary(progress).startswith("v done: 3 of 3 groups evaluated")
    assert fell_short(progress) == ""
