"""The verdict of `muster tasks check` on what the boxes said."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.cli.check import Tried, show, tries


def test_a_right_reward_everywhere_is_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    found = [Tried("a", "nothing", 0.0, 0.0, ""), Tried("a", "solve", 1.0, 1.0, "")]
    assert show(found, as_json=False) == 0
    assert "2 tries, 0 with a wrong reward" in capsys.readouterr().out


@pytest.mark.parametrize("reward", [0.0, 0.5, None])
def test_one_wrong_reward_is_status_1(
    reward: float | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show([Tried("a", "solve", 1.0, reward, "why")], as_json=False) == 1
    assert "✗" in capsys.readouterr().out


def test_the_three_tries_come_from_the_solution_folder(tmp_path: Path) -> None:
    (tmp_path / "solution").mkdir()
    (tmp_path / "solution" / "wrong.sh").write_text("false")
    (tmp_path / "solution" / "solve.sh").write_text("true")
    found = [(attempt.way, attempt.script, attempt.wanted) for attempt in tries(tmp_path)]
    assert found == [("nothing", "", 0.0), ("wrong", "false", 0.0), ("solve", "true", 1.0)]
