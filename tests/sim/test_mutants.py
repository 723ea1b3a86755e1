"""The planted bugs of `make mutants` still fit the code, and name tests that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.mutants import PATCHES, ROOT, read

PLANTED = sorted(PATCHES.glob("*.patch"))


@pytest.mark.parametrize("patch", PLANTED, ids=lambda path: path.stem)
def test_a_planted_bug_fits_the_code_as_it_is(patch: Path) -> None:
    mutant = read(patch)
    assert mutant.what
    assert all((ROOT / test).is_file() for test in mutant.tests)
    lines = patch.read_text(encoding="utf-8").splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("+++ b/"))
    path = lines[at].removeprefix("+++ b/")
    assert path.startswith(("services/", "muster/"))
    hunk = [line for line in lines[at + 2 :] if not line.startswith("@@")]
    before = "\n".join(line[1:] for line in hunk if line[:1] in (" ", "-"))
    assert (ROOT / path).read_text(encoding="utf-8").count(before) == 1


def test_there_are_ten_or_more() -> None:
    assert len(PLANTED) >= 10
