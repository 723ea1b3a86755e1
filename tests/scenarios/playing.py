"""Stories as text: blocks of `input ---- output`, and what a machine says to them today.

Owns: the form of the files. Promise: comment blocks stay as they are; with `--rewrite` the output
of today replaces the expected one. Does not cover: verbs (the tests of each machine).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


class Story:
    """One machine and what surrounds it; lives through one file. Verbs are methods `do_VERB`."""

    def line(self, text: str) -> list[str]:
        """Carry out `VERB word … name=word …`; what was said to it."""
        verb, *words = text.split()
        named = dict(word.split("=", 1) for word in words if "=" in word)
        plain = [word for word in words if "=" not in word]
        do: Callable[..., list[str]] = getattr(self, f"do_{verb}")
        return do(*plain, **named)


def play(story: Story, text: str) -> str:
    """The same text with the output of today."""
    out = []
    for block in text.strip().split("\n\n"):
        lines = block.split("\n")
        given = lines[: lines.index("----")] if "----" in lines else lines
        if all(line.startswith("#") for line in given):
            out.append("\n".join(given))
            continue
        said = [x for line in given if not line.startswith("#") for x in story.line(line)]
        out.append("\n".join([*given, "----", *said]))
    return "\n\n".join(out) + "\n"


def check(story: Story, path: Path, request: pytest.FixtureRequest) -> None:
    """The file tells what happens, or is made to."""
    text = path.read_text("utf-8")
    played = play(story, text)
    if request.config.getoption("--rewrite", default=False):
        path.write_text(played, "utf-8")
    else:
        assert played == text
