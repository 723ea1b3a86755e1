"""The index of cached prefixes against an oracle that remembers everything and walks it all."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from services.router.prefix import Mark, PrefixIndex

BLOCK, ENTRIES_MAX = 10, 6


class Oracle:
    """Per replica a list of [salt, hash, newest use, use before], the next to go first."""

    def __init__(self) -> None:
        self.rows: dict[str, list[list[int]]] = {}
        self.uses = 0

    def dispatched(self, replica: str, salt: int, marks: list[Mark]) -> None:
        self.uses += 1
        rows = self.rows.setdefault(replica, [])
        for hash_, _ in marks[::-1]:
            old = [r for r in rows if r[:2] == [salt, hash_]]
            rows[:] = [r for r in rows if r[:2] != [salt, hash_]]
            rows.append([salt, hash_, self.uses, old[0][2] if old else 0])
        rows[:] = rows[-ENTRIES_MAX:]

    def cached(self, replica: str, salt: int, marks: list[Mark]) -> int:
        there = {(r[0], r[1]) for r in self.rows.get(replica, [])}
        return max((tokens for hash_, tokens in marks if (salt, hash_) in there), default=0)

    def corrected(self, replica: str, salt: int, marks: list[Mark], cached: int) -> int:
        if not marks or marks[-1][1] - cached <= BLOCK:
            return 0
        rows = self.rows.get(replica, [])
        newest = [r for r in rows if r[:2] == [salt, marks[-1][0]]]
        if newest:
            rows[:] = [r for r in rows if r[2] > newest[0][3]]
        return marks[-1][1] - cached


def chain(path: list[int]) -> list[Mark]:
    """Marks of a context: equal beginnings of two paths have equal hashes."""
    return [(hash(tuple(path[: n + 1])), BLOCK * (n + 1)) for n in range(len(path))]


replicas = st.sampled_from(["a", "b"])
salts = st.integers(0, 1)
contexts = st.lists(st.integers(0, 1), min_size=0, max_size=5).map(chain)
acts = st.one_of(
    st.tuples(st.just("dispatched"), replicas, salts, contexts, st.just(0)),
    st.tuples(st.just("corrected"), replicas, salts, contexts, st.integers(0, 50)),
    st.tuples(st.just("clear"), replicas, salts, contexts, st.just(0)),
    st.tuples(st.just("forget"), replicas, salts, contexts, st.just(0)),
)


@given(st.lists(acts, max_size=25), replicas, salts, contexts)
def test_it_finds_what_the_oracle_finds(
    story: list[tuple[str, str, int, list[Mark], int]], where: str, salt: int, asked: list[Mark]
) -> None:
    known, oracle = PrefixIndex(BLOCK, ENTRIES_MAX), Oracle()
    for act, replica, version, marks, cached in story:
        if act == "dispatched":
            known.dispatched(replica, version, marks)
            oracle.dispatched(replica, version, marks)
        elif act == "corrected":
            shortfall = known.corrected(replica, version, marks, cached)
            assert shortfall == oracle.corrected(replica, version, marks, cached)
        else:
            getattr(known, act)(replica)
            oracle.rows.pop(replica, None)
        assert known.entries(replica) <= ENTRIES_MAX
    assert known.cached(where, salt, asked) == oracle.cached(where, salt, asked)
