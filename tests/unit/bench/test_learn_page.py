"""The page of the learning runs: what is there is shown, what is not is called not yet run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from bench import _learn_plan as plan
from bench import learn
from bench._learn_page import WANTED, written
from bench._learn_plot import drawn


def phase(passed: int) -> dict[str, Any]:
    told: dict[str, Any] = {
        f"{t:g}": {"tasks": {task: [passed, plan.SAMPLES] for task in plan.TIER}}
        for t in plan.TEMPERATURES
    }
    turn = {"command": "echo a > b.txt\n```", "exit_code": 0, "output": "out", "box": "box-1"}
    verdict = {"outcome": "model_success", "cause": "passed", "reward": 1.0}
    one = {"episode": "after-20-00001.0.0", "task": "muster/note-word@1010000", "turns": [turn]}
    told["0.2"]["evidence"] = [{**one, "verdict": verdict}]
    return told


def step(number: int, reward: float) -> dict[str, Any]:
    figures = {"variance": 4, "step_kl": 0.01, "k3": 0.002, "ess": 0.99, "lag": 0.0}
    return {"step": number, "reward": reward, **figures}


def result(arm: str, seed: int, after: int = 12) -> dict[str, Any]:
    found: dict[str, Any] = {
        "arm": arm,
        "seed": seed,
        "recipe": {},
        "starts": 1,
        "phases": {"train": {"wall_s": 600.0, "cpu_s": 900.0}},
        "before": phase(4),
        "training": {
            "steps": [step(1, 0.2), step(2, 0.6)],
            "attempts": {"model_success: passed": 8, "infra_failure: box_start": 2},
            "repaired": 2,
            "restored_boxes": 0,
            "siblings_trained": 8,
            "siblings_left_out": 0,
            "checkpoint": "/machine/of/the/run",
        },
        "after": phase(after),
    }
    return learn.result(found)


def test_a_run_without_a_result_is_called_not_yet_run() -> None:
    page = written({("main", 1): result("main", 1)})
    assert page.count("not yet run |") == len(WANTED) - 1
    assert "lag4_tis and lag4_none: not yet run." in page
    assert "infra20: not yet run." in page


def test_gain_tasks_and_evidence_are_those_of_the_result() -> None:
    page = written({("main", 1): result("main", 1)})
    assert "| +50.0 points, met | 15 min | 10 min |" in page
    assert "| note-word | 4 → 12 | 4 → 12 | 4 → 12 |" in page
    assert "  $ echo a > b.txt\n" in page
    assert "  verdict: model_success (passed), reward 1" in page


def test_no_command_of_the_model_ends_the_block_it_is_shown_in() -> None:
    page = written({("main", 1): result("main", 1)})
    assert page.count("```") == 2


def test_a_gain_below_the_target_is_called_missed() -> None:
    assert "**missed**" in written({("main", 1): result("main", 1, after=7)})


def test_lost_attempts_are_counted_and_none_is_said_to_be_trained() -> None:
    page = written({("infra20", 1): result("infra20", 1)})
    assert "Of 10 attempts 2 (20 %) were failures of the infrastructure" in page


def test_a_lag_that_is_unknown_is_in_no_mean() -> None:
    found = result("main", 1)
    found["training"]["steps"][0]["lag"], found["training"]["steps"][1]["lag"] = None, 3.0
    assert "| 0.990 | 3.00 | 2 of 10 |" in written({("main", 1): found})


def test_a_result_names_no_folder_of_the_machine_it_ran_on() -> None:
    assert "/machine" not in json.dumps(result("main", 1))


def test_the_plot_has_a_line_for_each_run() -> None:
    tree = ElementTree.fromstring(drawn({key: result(*key) for key in WANTED}))
    names = [element.tag.rpartition("}")[2] for element in tree]
    assert names.count("polyline") == len(WANTED)
    assert names.count("circle") == 2 * len(WANTED)


def test_page_and_plot_are_made_from_the_files(tmp_path: Path) -> None:
    assert learn.reported(tmp_path) == 0
    assert (tmp_path / "learning.md").read_text().count("not yet run |") == len(WANTED)
    (tmp_path / "learning").mkdir()
    (tmp_path / "learning" / "main-1.json").write_text(json.dumps(result("main", 1)))
    assert learn.reported(tmp_path) == 0
    assert (tmp_path / "learning.md").read_text().startswith("# Does it learn?")
    assert "<svg" in (tmp_path / "learning.svg").read_text()
