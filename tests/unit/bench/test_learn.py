"""A learning run: its seeds keep apart, its figures are those of the record, it goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import _learn_figures as figures
from bench import _learn_plan as plan
from bench import learn
from bench._learn_run import STATE, Run
from bench._process_tree import cpu_s
from muster.config import load_config
from muster.errors import InvalidInput, Refused
from muster.taskset import read_instances
from muster.types import Outcome, OutcomeLabel
from services.trainer.config import TrainerConfig
from tests.unit.conftest import FAILED, PASSED, Story

TASKS = Path(__file__).parents[3] / "tasks"
INFRA = OutcomeLabel(Outcome.INFRA_FAILURE, "box_start")


def tier() -> list[Path]:
    return [TASKS / name for name in plan.TIER]


# -- seeds -------------------------------------------------------------------------------


def test_the_tier_is_what_the_tasks_call_easy_and_can_be_held_out() -> None:
    easy = [
        path.parent.name
        for path in TASKS.glob("*/task.toml")
        if (text := path.read_text("utf-8"))
        and 'difficulty = "easy"' in text
        and "muster_parameters" in text
        and "muster_split" not in text
    ]
    assert sorted(easy) == sorted(plan.TIER)


@pytest.mark.parametrize("seed", [*plan.JUDGING_SEEDS, plan.TUNING_SEED])
def test_nothing_that_judges_is_trained_on(seed: int) -> None:
    """By content: the instruction, the files and the verifier of no instance are the same."""
    rounds = plan.SAMPLES // plan.EVAL_GROUP
    trained = read_instances(
        tier(), seed=plan.training_seed(seed), groups=plan.RECIPE.rounds * len(tier())
    )
    judged = read_instances(
        tier(), seed=plan.held_out_seed(seed), groups=rounds * len(tier()), split="all"
    )
    assert {task.digest for task in judged}.isdisjoint(task.digest for task in trained)


def test_runs_of_different_seeds_train_on_different_instances() -> None:
    ranges = [range(plan.training_seed(s), plan.training_seed(s) + plan.RECIPE.rounds) for s in
              (plan.TUNING_SEED, *plan.JUDGING_SEEDS)]  # fmt: skip
    assert len({seed for one in ranges for seed in one}) == sum(map(len, ranges))


def test_a_seed_whose_instances_would_be_held_out_is_refused() -> None:
    plan.check_seed(99)
    with pytest.raises(InvalidInput, match="not a seed of a run"):
        plan.check_seed(100)


@pytest.mark.parametrize("name", plan.ARMS)
def test_the_settings_of_every_arm_are_settings(name: str) -> None:
    arm = plan.ARMS[name]
    config = load_config(
        None, plan.variables(plan.RECIPE, "/nowhere", "m") | plan.training(plan.RECIPE, arm)
    )
    trainer = config.section("trainer", TrainerConfig)
    assert trainer.lr == plan.RECIPE.lr
    assert trainer.correction == ("none" if name == "lag4_none" else "tis")
    assert config.sections["router"].model_dump()["lag_max"] == (4 if "lag4" in name else 0)


def test_the_last_step_of_a_run_is_a_checkpoint() -> None:
    assert plan.RECIPE.steps % plan.RECIPE.checkpoint_every == 0


# -- figures -----------------------------------------------------------------------------


def test_a_sibling_counts_with_the_attempt_that_replaced_a_failed_one(story: Story) -> None:
    story.opened("eval-00000", task="muster/note-word@1000001", job="eval")
    story.episode("eval-00000", 0, label=INFRA)
    story.episode("eval-00000", 0, 1, label=PASSED)
    story.episode("eval-00000", 1, label=FAILED)
    story.opened("other-00000", task="muster/note-word@5", job="other")
    story.episode("other-00000", 0, label=PASSED)
    found = figures.evaluated(story.record(), "eval")
    assert found["tasks"] == {"note-word": [1, 2]}
    assert (found["passed"], found["samples"]) == (1, 2)
    assert found["instances"] == ["muster/note-word@1000001"]


def test_what_was_never_valid_is_told_and_not_counted(story: Story) -> None:
    story.opened("eval-00000", job="eval")
    story.episode("eval-00000", 0, label=INFRA)
    story.episode("eval-00000", 1, label=PASSED)
    found = figures.evaluated(story.record(), "eval")
    assert found["samples"] == 1
    assert found["outcomes"]["infra_failure: box_start"] == 1


def test_the_course_of_a_training_has_rewards_by_task_and_lag(story: Story) -> None:
    for number, version in ((0, 0), (1, 0)):
        group = f"train-0000{number}"
        story.opened(group, task=f"muster/task-{number}@3", job="train")
        for sibling in range(2):
            label = PASSED if sibling <= number else FAILED
            story.episode(group, sibling, label=label, version=version)
    story.train(1, {"train-00000": [0, 0]})
    story.train(2, {"train-00001": [0, 0]})
    first, second = figures.trained(story.record())["steps"]
    assert (first["reward"], second["reward"]) == (0.5, 1.0)
    assert (first["tasks"], second["tasks"]) == ({"task-0": 0.5}, {"task-1": 1.0})
    assert (first["lag"], second["lag"]) == (0.0, 1.0)


def test_the_lag_of_episodes_of_a_version_that_was_lost_is_not_known(story: Story) -> None:
    story.opened("train-00000", job="train")
    story.episode("train-00000", 0, label=PASSED, version=7)  # of a trainer that went back
    story.train(1, {"train-00000": [0]})
    (step,) = figures.trained(story.record())["steps"]
    assert (step["samples"], step["lag"]) == (1, None)


def test_no_failure_of_the_infrastructure_counts_as_trained(story: Story) -> None:
    story.opened("train-00000", job="train")
    story.episode("train-00000", 0, label=INFRA)
    story.episode("train-00000", 0, 1, label=PASSED)
    story.episode("train-00000", 1, 2, label=INFRA)
    story.train(1, {"train-00000": [1, 2]})
    found = figures.trained(story.record())
    assert found["siblings_trained"] == found["siblings_left_out"] == 1
    assert found["attempts"] == {"infra_failure: box_start": 2, "model_success: passed": 1}
    assert found["steps"][0]["samples"] == 1


def state(before: int, after: int) -> dict[str, Any]:
    """Passes of 16 at 0.2; fewer by 2 and by 4 at 0.6 and 1."""

    def phase(passed: int) -> dict[str, Any]:
        told = zip(("0.2", "0.6", "1"), (0, 2, 4), strict=True)
        return {t: {"tasks": {"a": [passed - n, 16], "b": [passed - n, 16]}} for t, n in told}

    return {
        "before": phase(before),
        "after": phase(after),
        "phases": {"before": {"wall_s": 10.0, "cpu_s": 15.0}, "train": {"wall_s": 1, "cpu_s": 2}},
    }


def test_the_gain_is_over_the_best_temperature_of_the_untrained_model() -> None:
    found = learn.figures(state(4, 12))
    assert found["best_temperature"] == 0.2
    assert found["gain_points"] == 50.0
    assert found["after_1_percent"] == 50.0
    assert (found["wall_s"], found["cpu_s"]) == (11, 17)


# -- going on ----------------------------------------------------------------------------


def run(folder: Path, seed: int = 1) -> Run:
    return Run(plan.ARMS["main"], seed, plan.RECIPE, folder, "m")


def kept(folder: Path, **more: Any) -> None:
    told = {"arm": "main", "seed": 1, "recipe": figures.plain(plan.RECIPE), "starts": 1}
    (folder / STATE).write_text(json.dumps({**told, "phases": {}, **more}))


def test_a_run_that_has_ended_does_nothing_again(tmp_path: Path) -> None:
    kept(tmp_path, before={"x": 1}, training={"checkpoint": "c"}, after={"y": 2})
    found = run(tmp_path).go()
    assert (found["before"], found["after"], found["starts"]) == ({"x": 1}, {"y": 2}, 2)


def test_the_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    kept(tmp_path)
    with pytest.raises(Refused, match="another run"):
        run(tmp_path, seed=2)


def test_processor_time_is_that_of_a_process_and_all_below_it() -> None:
    busy = "import time\nwhile time.process_time() < 0.3: pass"
    before = cpu_s(os.getpid())
    subprocess.run([sys.executable, "-c", busy], check=True)
    assert cpu_s(os.getpid()) - before >= 0.25
