"""No complete group waits for ever, whichever job it is of and however slow it was."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from services.readybank.batch import Overtaken, Ready, choose

EXAMPLES = int(os.environ.get("MUSTER_TEST_EXAMPLES", "200"))


@settings(max_examples=EXAMPLES, derandomize=True)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=60),  # how long each group takes
    st.lists(st.sampled_from("open cut cut".split()), max_size=80),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_a_complete_group_is_in_one_of_the_next_batches(
    takes: list[int], todo: list[str], groups: int, fairness: int
) -> None:
    """With n groups known when it became complete, at most n / groups batches later, rounded up."""
    overtaken, now, waits = Overtaken(fairness), 0, dict[str, tuple[int, int]]()
    opened: dict[str, float] = {}
    under_way: list[tuple[int, str]] = []
    ready: dict[str, Ready] = {}
    batches: list[float] = []  # when the first group of each was opened
    for what in [*todo, *["cut"] * 40]:
        now += 1
        if what == "open" and takes:
            name = f"job{len(takes) % 3}-{now}"
            opened[name] = float(now)
            under_way.append((now + takes.pop(), name))
        for item in sorted(x for x in under_way if x[0] <= now):
            under_way.remove(item)
            ready[item[1]] = Ready(float(now), opened[item[1]])
            waits[item[1]] = (len(batches), len(under_way) + len(ready))
        before = overtaken.before(len(batches), lambda step: batches[step - 1])
        for name in choose(ready, groups, before) if what == "cut" else ():
            since, known = waits[name]
            assert len(batches) - since < -(-known // groups)
            del ready[name]
        _count(batches, opened, ready, waits, what)


def _count(
    batches: list[float], opened: dict[str, float], ready: dict[str, Any], waits: Any, what: str
) -> None:
    """Those that left since the last batch are one more."""
    gone = [name for name in waits if name not in ready and name in opened]
    if gone:
        batches.append(min(opened.pop(name) for name in gone))
