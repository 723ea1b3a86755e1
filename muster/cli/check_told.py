"""What `muster tasks check` says of the tries: the table, why one is wrong, what to do.

Promise: whatever a box printed is cleaned, and shown from its end, where the cause stands; programs
get more of it. Does not cover: trying (check.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from muster import fetching
from muster.clean import clean
from muster.cli.check_plan import WAYS, Plan
from muster.cli.screen import emit
from muster.types import Value

OUTPUT_CHARACTERS = 4000  # of each output, for programs and with --verbose
_SHOWN = 400  # of each output, for people
_MISSING = re.compile(
    r"(?:^|[\s:])([\w.+/-]+): (?:command )?not found|No module named '?([\w.]+)|"
    r"env: ‘?'?([\w.+-]+)’?'?: No such file"
)


class Tried(Value, frozen=True):
    """What came of it; `reward` is None when there was no verdict.

    detail: why it is not the one that is wanted, on one line. output: the end of what the verifier
    printed. script: how the solution's own script ended; script_output: the end of what it printed.
    hint: what may be the cause, and what to do.
    """

    task: str
    way: str
    wanted: float
    reward: float | None
    detail: str
    output: str = ""
    script: str = ""
    script_output: str = ""
    hint: str = ""

    @property
    def right(self) -> bool:
        return self.reward == self.wanted


def hint(status: str, outputs: str) -> str:
    """What the outputs of a try that went wrong point to; empty when nothing is known."""
    if fetching.missed(outputs):
        return f"{fetching.NO_NETWORK}: what is fetched has to be there. {fetching.COPY_IT}"
    if found := _MISSING.search(outputs):
        name = next(group for group in found.groups() if group)
        return f"{name} is not in the box: put it into a base (docs/SANDBOX.md, Bases)"
    if status == "timeout":
        return "a verdict counts only when the verifier ends in time, also one written before"
    return ""


def tail(text: str, longest: int) -> str:
    """The end of a text."""
    return text if len(text) <= longest else f"…{text[-longest:]}"


def line(tried: Tried) -> str:
    """One try, as it ends."""
    verdict = "right" if tried.right else f"WRONG, wanted {tried.wanted:g}: {tried.detail}"
    return f"{tried.task} {tried.way}: {_reward(tried)} {verdict}"


def explained(tried: Tried, *, verbose: bool) -> list[str]:
    """Why a try has not the reward that it must have; cleaned."""
    head = f"{tried.task} {tried.way}: {_reward(tried)}, wanted {tried.wanted:g}: {tried.detail}"
    lines = [clean(head)]
    for name, said in (("verifier", tried.output), ("script", tried.script_output)):
        if name == "script" and tried.script:
            lines.append(clean(f"  the {tried.way} script {tried.script}"))
        if said.strip():
            rows = [row for row in said.split("\n") if row.strip()]
            shown = rows if verbose else [tail(" | ".join(rows), _SHOWN)]
            lines.append(f"  the {name} printed" + (":" if verbose else ", at the end:"))
            lines += [clean(f"    {row}") for row in shown]
    if tried.hint:
        lines.append(clean(f"  → {tried.hint}"))
    elif not verbose:
        lines.append("  → --verbose shows more of what was printed")
    return lines


def show(results: Sequence[Tried], planned: Plan, as_json: bool, verbose: bool = False) -> int:
    """Print the table, remarks and refusals; the exit status."""
    wrong = [tried for tried in results if not tried.right]
    refused = {note.task for note in planned.refused}
    if as_json:
        for tried in results:
            emit("tried", tried)
        for name, notes in (("remark", planned.remarks), ("refused", planned.refused)):
            for note in notes:
                emit(name, note)
        emit("checked", {"tries": len(results), "wrong": len(wrong), "refused": len(refused)})
    else:
        print(_table(results, sorted(refused)))
        for tried in wrong:
            print("\n".join(explained(tried, verbose=verbose)))
        for note in planned.remarks:
            print(clean(f"remark: {note.task}: {note.field}: {note.text}"))
        for note in planned.refused:
            print(clean(f"refused: {note.task}: {note.field}: {note.text} → {note.way_out}"))
        told = f"{len(results)} tries, {len(wrong)} with a wrong reward"
        print(f"{told}; refused: {len(refused)}" if refused else told)
    return 1 if wrong or refused else 0


def _table(results: Iterable[Tried], refused: Sequence[str]) -> str:
    rows: dict[str, dict[str, str]] = {}
    for tried in results:
        reward = _reward(tried)
        mark = reward if tried.right else f"{reward} ✗"
        rows.setdefault(tried.task, {})[tried.way] = mark
    for name in refused:
        rows[name] = {way: "refused" for way in WAYS}
    width = max([len(name) for name in rows] + [4])
    lines = [f"{'task':<{width}}  {'nothing':>8}  {'wrong':>8}  {'solve':>8}"]
    for name, cells in rows.items():
        marks = "  ".join(f"{cells.get(way, ''):>8}" for way in WAYS)
        lines.append(f"{name:<{width}}  {marks}")
    return "\n".join(lines)


def _reward(tried: Tried) -> str:
    return "none" if tried.reward is None else f"{tried.reward:g}"
