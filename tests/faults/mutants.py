"""`python -m tests.faults.mutants`: planted bugs, each of which must be caught.

Owns: applying one patch of tests/faults/mutants/ after the other to a copy of the tree, running the
tests that it names, and then, unless those caught it, up to `--seeds` fault seeds. Promise: the
tree itself is never touched; what is run is first run without a bug, where it must pass. Prints who
caught what; the exit status is 1 when a bug survived and 2 when it could not be planted.

A patch begins with one line that says what goes wrong, and a line `Tests:` with the files that
should see it (none: the fault seeds alone have to).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATCHES = ROOT / "tests" / "faults" / "mutants"
_LIMIT_S = 1800
_ROWS = "{:<36} {:<10} {:<10} {}"


@dataclass
class Mutant:
    """One planted bug."""

    name: str
    patch: Path
    what: str
    tests: tuple[str, ...]


@dataclass
class Arguments:
    """The command line."""

    only: list[str] = field(default_factory=list)
    seeds: int = 200
    jobs: int = 1
    both: bool = False


def read(patch: Path) -> Mutant:
    lines = patch.read_text(encoding="utf-8").splitlines()
    tests = next(line for line in lines if line.startswith("Tests:"))
    return Mutant(patch.stem, patch, lines[0], tuple(tests.removeprefix("Tests:").split()))


def main() -> int:
    arguments = _parsed()
    found = [read(patch) for patch in sorted(PATCHES.glob("*.patch"))]
    mutants = [m for m in found if not arguments.only or any(o in m.name for o in arguments.only)]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        _copy(tree)
        if not _sound(tree, mutants, arguments):
            return 2
        _say(_ROWS.format("planted", "tests", "seeds", "what"))
        survived = 0
        for mutant in mutants:
            if not _apply(tree, mutant.patch):
                _say(f"{mutant.name}: the patch does not fit the code any more; make it anew")
                return 2
            caught = _hunt(tree, mutant, arguments)
            _say(_ROWS.format(mutant.name, *caught, mutant.what))
            survived += "caught" not in caught
            _apply(tree, mutant.patch, back=True)
    _say(f"{len(mutants)} planted, {survived} survived")
    return 1 if survived else 0


def _parsed() -> Arguments:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], help="parts of names")
    parser.add_argument("--seeds", type=int, default=200, help="fault seeds for one bug")
    parser.add_argument("--jobs", type=int, default=1, help="processes for the fault seeds")
    parser.add_argument("--both", action="store_true", help="the fault seeds in any case")
    return parser.parse_args(namespace=Arguments())


def _hunt(tree: Path, mutant: Mutant, arguments: Arguments) -> tuple[str, str]:
    """What tests and seeds say: "caught", "passed" or "-"."""
    tests = "-"
    if mutant.tests:
        tests = _verdict(_tests(tree, mutant.tests))
    if tests == "caught" and not arguments.both:
        return tests, "-"
    return tests, _verdict(_seeds(tree, arguments.seeds, arguments.jobs))


def _verdict(status: int) -> str:
    return {0: "passed", 1: "caught"}.get(status, f"status {status}")


def _sound(tree: Path, mutants: Sequence[Mutant], arguments: Arguments) -> bool:
    """Without a bug nothing may be caught."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    if tests and _tests(tree, tests):
        _say("the named tests fail without a planted bug: mend that first")
        return False
    if _seeds(tree, min(arguments.seeds, 20), arguments.jobs):
        _say("the fault seeds find something without a planted bug: run `make sim-faults`")
        return False
    return True


def _copy(tree: Path) -> None:
    """What git would put under version control, as it lies there; all of it without git."""
    if not (ROOT / ".git").exists():
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".venv", "__pycache__"))
        return
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout.decode()
    for name in filter(None, listed.split("\0")):
        source, target = ROOT / name, tree / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def _apply(tree: Path, patch: Path, *, back: bool = False) -> bool:
    reverse = ["-R"] if back else []
    command = ["git", "apply", "-C1", "--recount", *reverse, str(patch)]
    return not subprocess.run(command, cwd=tree, check=False).returncode


def _tests(tree: Path, tests: Sequence[str]) -> int:
    return _run(tree, "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests)


def _seeds(tree: Path, seeds: int, jobs: int) -> int:
    options = ("--rough", "--until-first", "--no-shrink", "--jobs", str(jobs))
    return _run(tree, "sim", "--seeds", str(seeds), *options)


def _run(tree: Path, module: str, *arguments: str) -> int:
    """Exit status of a Python module run in the copy; its output goes nowhere."""
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree)}
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=tree,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124
    return done.returncode


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
