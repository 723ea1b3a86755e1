"""What the answer has to be."""

import os
from pathlib import Path

ANSWER = Path("/app/sorted.txt")


def test_there_is_an_answer():
    assert ANSWER.is_file()
    assert not ANSWER.is_symlink()


def test_it_is_sorted():
    assert ANSWER.read_text() == "Ada\nGrace\nWalter\n"


def test_it_runs_in_the_task_s_folder():
    assert os.getcwd() == "/app"
