"""A journal replays to the recorded decisions; any edit shows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from muster.cli.inspect import app
from muster.errors import InvalidInput
from muster.journal import Journal, verify

MACHINE = """
import msgspec

class Rules(msgspec.Struct, frozen=True):
    step: int

class Add(msgspec.Struct, frozen=True, tag=True):
    n: int

class Tick(msgspec.Struct, frozen=True, tag=True):
    pass

class Say(msgspec.Struct, frozen=True, tag=True):
    total: int

class Adder:
    name, rules_type, event_type, tick_type = "adder", Rules, Add | Tick, Tick

    def __init__(self, rules):
        self.total, self.step = 0, rules.step

    def handle(self, event, now):
        if isinstance(event, Tick):
            return []
        self.total += event.n * self.step
        return [Say(self.total)] * (event.n % 3)
"""
ENTRY_POINTS = "[muster.machines]\nadder = muster_test_adder:Adder\n"


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A distribution with one machine, installed for this test."""
    site = tmp_path / "site"
    info = site / "muster_test_adder-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: muster-test-adder\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (site / "muster_test_adder.py").write_text(MACHINE)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "muster_test_adder", raising=False)
    import importlib

    yield importlib.import_module("muster_test_adder")
    sys.modules.pop("muster_test_adder", None)


@pytest.fixture
def recorded(plugin: Any, tmp_path: Path) -> Path:
    """Five additions and two ticks."""
    path = tmp_path / "journal" / "adder.jsonl"
    rules = plugin.Rules(step=2)
    machine, journal = plugin.Adder(rules), Journal(path, "adder", rules)
    for now, event in enumerate(
        [plugin.Add(1), plugin.Tick(), *(plugin.Add(n) for n in (2, 3, 4)), plugin.Tick()]
    ):
        journal.record(float(now), event, machine.handle(event, float(now)))
    journal.close()
    return path


def edit(path: Path, line: int, old: str, new: str) -> None:
    lines = path.read_text().splitlines(keepends=True)
    assert old in lines[line]
    lines[line] = lines[line].replace(old, new)
    path.write_text("".join(lines))


def test_a_journal_replays_to_equal_decisions_and_ticks_are_not_counted(recorded: Path) -> None:
    found = verify(recorded)
    assert (found.machine, found.events, found.commands, found.problem) == ("adder", 4, 4, "")


EDITS = [
    (1, '"n":1', '"n":2'),
    (3, '"n":2', '"n": 2'),  # the same value, written otherwise
    (3, '"total":6', '"total":7'),
    (4, '"now":3.0', '"now":3.5'),
    (2, '"type":"Tick"', '"type":"Tack"'),
    (0, '"step":2', '"step":3'),
    (6, '"commands":[]', '"commands":[{"type":"Say","total":1}]'),
]


@pytest.mark.parametrize(("line", "old", "new"), EDITS)
def test_one_edit_is_found_where_it_is(recorded: Path, line: int, old: str, new: str) -> None:
    edit(recorded, line, old, new)
    assert verify(recorded).problem.startswith(f"line {max(line, 1) + 1}: ")


@pytest.mark.parametrize("line", [1, 2, 3])
def test_a_missing_line_is_found(recorded: Path, line: int) -> None:
    lines = recorded.read_text().splitlines(keepends=True)
    recorded.write_text("".join(lines[:line] + lines[line + 1 :]))
    assert verify(recorded).problem.startswith(f"line {line + 1}: ")


def test_reordered_lines_are_found(recorded: Path) -> None:
    lines = recorded.read_text().splitlines(keepends=True)
    recorded.write_text("".join([lines[0], lines[2], lines[1], *lines[3:]]))
    assert verify(recorded).problem.startswith("line 2: ")


def test_a_machine_that_decides_otherwise_is_found(
    plugin: Any, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is intact; the code has changed."""

    class Changed(plugin.Adder):  # type: ignore[name-defined,misc]
        def handle(self, event: Any, now: float) -> Any:
            return super().handle(event, now) if now < 2 else []

    monkeypatch.setattr(plugin, "Adder", Changed)
    problem = verify(recorded).problem
    assert problem == 'line 4: decision 0: recorded {"type":"Say","total":6}, replay nothing'


def test_a_torn_last_line_is_what_a_crash_leaves(recorded: Path) -> None:
    recorded.write_bytes(recorded.read_bytes()[:-9])
    assert verify(recorded).problem == ""


@pytest.mark.parametrize("left", [0, 5, 20])
def test_a_torn_header_is_what_a_crash_at_the_start_leaves(recorded: Path, left: int) -> None:
    recorded.write_bytes(recorded.read_bytes()[:left])
    found = verify(recorded)
    assert (found.events, found.problem) == (0, "")


def test_a_journal_without_events_has_its_header_at_once(plugin: Any, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "fresh.jsonl", "adder", plugin.Rules(2))
    found = verify(tmp_path / "fresh.jsonl")
    journal.close()
    assert (found.machine, found.events) == ("adder", 0)


def test_a_torn_line_in_the_middle_is_a_problem(recorded: Path) -> None:
    lines = recorded.read_bytes().splitlines(keepends=True)
    recorded.write_bytes(b"".join([*lines[:2], lines[2][:-9] + b"\n", *lines[3:]]))
    assert "unreadable" in verify(recorded).problem


def test_an_edited_last_line_does_not_pass_as_torn(recorded: Path) -> None:
    edit(recorded, 5, '"n":4', '"n":5')
    lines = recorded.read_bytes().splitlines(keepends=True)
    recorded.write_bytes(b"".join(lines[:6]).rstrip(b"\n"))
    assert verify(recorded).problem.startswith("line 6: ")


@pytest.mark.parametrize(
    "first",
    [
        b"x\n",
        b"{}\n",
        b'{"machine":"nobody","rules":{}}\n',
        b'{"machine":"adder","rules":{}}\n',
    ],
)
def test_a_file_that_is_no_journal_is_named(plugin: Any, tmp_path: Path, first: bytes) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(first)
    with pytest.raises(InvalidInput, match="not a journal") as caught:
        verify(path)
    assert caught.value.value == str(path)


def muster(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["journal", "verify", *map(str, arguments)])


def test_the_command_counts_events_per_file_and_in_all(recorded: Path) -> None:
    recorded.with_name("second.jsonl").write_bytes(recorded.read_bytes())
    told = muster(recorded.parent)
    assert told.exit_code == 0, told.output
    lines = told.output.splitlines()
    assert lines[0] == f"{recorded}: adder: 4 events, 4 decisions: equal"
    assert lines[-1] == "2 journals, 8 events (timer ticks not counted)"


def test_the_command_exits_1_naming_file_and_line(recorded: Path) -> None:
    edit(recorded, 3, '"n":2', '"n":1')
    told = muster(recorded)
    assert told.exit_code == 1
    assert f"{recorded}: adder:" in told.output
    assert "DIFFERS at line 4: " in told.output


def test_the_command_refuses_a_path_without_journals(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        told = muster(path)
        assert told.exit_code == 2
        assert "there is no journal" in told.stderr


def test_a_journal_of_another_format_is_refused_and_not_called_wrong(
    plugin: Any, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin.Rules, "journal_format", 2, raising=False)
    with pytest.raises(InvalidInput, match="an older Muster: its commands have format 1"):
        verify(recorded)
