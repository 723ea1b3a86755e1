"""Which versions stand in the line of the newest one, whatever order their records come in."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.readybank.lineage import Lineage, Standing


def seen(*records: tuple[int, int]) -> Lineage:
    lineage = Lineage()
    for version, parent in records:
        lineage.see(version, parent, published=False)
    return lineage


def standings(lineage: Lineage, versions: range) -> str:
    """A letter each."""
    return "".join(lineage.standing(version)[0] for version in versions)


def test_a_version_without_its_record_keeps_older_ones_waiting_and_abandons_none() -> None:
    """A power cut took the record of 5; its trainer writes it again after that of 6."""
    lineage = seen((1, 0), (2, 1), (3, 2), (4, 3), (6, 5))
    assert standings(lineage, range(-1, 8)) == "faaaaakka"
    assert lineage.see(7, 6, published=False)
    assert standings(lineage, range(8)) == "aaaaakkk"
    assert lineage.see(5, 4, published=False)
    assert standings(lineage, range(8)) == "kkkkkkkk"


def test_what_a_trainer_went_back_from_stays_abandoned() -> None:
    lineage = seen((1, 0), (2, 1), (3, 1))
    assert standings(lineage, range(4)) == "kkak"
    assert lineage.standing(2) is Standing.ABANDONED


def test_parents_that_were_trimmed_away_are_no_gap() -> None:
    """A bank that starts on a trimmed stream sees the first record without its parent."""
    lineage = seen((10, 9), (11, 10), (12, 9))
    assert lineage.standing(11) is Standing.ABANDONED
    assert lineage.standing(0) is Standing.FOREIGN


@pytest.mark.parametrize("order", [*permutations([(1, 0), (2, 1), (3, 2), (4, 2), (5, 4)])])
def test_the_order_of_records_changes_nothing_in_the_end(
    order: tuple[tuple[int, int], ...],
) -> None:
    assert standings(seen(*order), range(7)) == "kkkakka"


@given(st.data())
def test_no_version_of_the_line_is_ever_called_abandoned(data: st.DataObject) -> None:
    """Against an oracle that knows all records from the start; those that go back come last."""
    last = data.draw(st.integers(1, 9))
    order = data.draw(st.permutations([(version, version - 1) for version in range(1, last + 1)]))
    first = min(order)  # a stream is read from its beginning
    lineage = Lineage()
    for version, parent in [first, *(record for record in order if record != first)]:
        lineage.see(version, parent, published=False)
        assert Standing.ABANDONED not in {lineage.standing(v) for v in range(last + 1)}
