"""Names of the blocks of a context: stable, chained, whole blocks only."""

from __future__ import annotations

from services.router.blocks import BlockChain
from services.router.context import Context, pack


def names(context: list[int], block: int = 4) -> list[int]:
    return BlockChain(block).extend(Context(pack(context)), len(context))


def test_only_whole_blocks_have_names() -> None:
    assert len(names([1, 2, 3])) == 0
    assert len(names([1, 2, 3, 4, 5, 6, 7])) == 1


def test_growing_step_by_step_gives_the_names_of_the_whole() -> None:
    ids = list(range(50))
    context, chain, found = Context(pack(ids[:6])), BlockChain(4), list[int]()
    for start, end in ((6, 6), (6, 11), (11, 12), (12, 49), (49, 50)):
        context.extend(ids[start:end])
        found += chain.extend(context, end)
    assert found == names(ids)
    assert (chain.name, chain.tokens) == (found[-1], 48)


def test_a_name_stands_for_everything_up_to_its_end() -> None:
    one, other = names([1, 2, 3, 4, 5, 6, 7, 8]), names([1, 2, 3, 9, 5, 6, 7, 8])
    assert set(one).isdisjoint(other)


def test_names_are_equal_in_every_process_and_fit_into_63_bits() -> None:
    found = names(list(range(400)))
    assert found[0] == 2959743083299715839
    assert all(0 <= name < 1 << 63 for name in found)
    assert len(set(found)) == 100
