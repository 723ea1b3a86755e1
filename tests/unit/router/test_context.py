"""A packed context is what packing all of its ids gives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.codec import pack_ids
from services.router.context import Context

IDS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20)


@given(IDS, st.lists(IDS, max_size=6))
def test_it_is_packed_as_if_all_at_once(head: list[int], parts: list[list[int]]) -> None:
    context, whole = Context(pack_ids(head)), list(head)
    for part in parts:
        context.extend(part)
        whole += part
        assert context.packed() == pack_ids(whole)
    assert (context.ids(), len(context)) == (whole, len(whole))
    assert context.last == (whole[-1] if whole else None)


@given(IDS, IDS, st.data())
def test_a_block_is_a_part_of_it_wherever_the_head_ends(
    head: list[int], tail: list[int], data: st.DataObject
) -> None:
    context, whole = Context(pack_ids(head)), head + tail
    context.extend(tail)
    end = data.draw(st.integers(0, len(whole)))
    start = data.draw(st.integers(0, end))
    assert context.block(start, end) == pack_ids(whole[start:end])


@given(IDS, IDS)
def test_what_is_taken_back_leaves_what_was_before(kept: list[int], taken: list[int]) -> None:
    context = Context(pack_ids([1, 2]))
    context.extend(kept)
    context.extend(taken)
    context.cut(len(taken))
    assert context.ids() == [1, 2, *kept]


def test_a_head_is_shared_and_cannot_be_taken_back() -> None:
    head = pack_ids([1, 2, 3])
    one, other = Context(head), Context(head)
    one.extend([4])
    with pytest.raises(ValueError, match="appended"):
        one.cut(2)
    assert other.packed() == head
