"""Sequences into micro-batches without padding, siblings sharing their prompt.

Owns: `MicroBatch`. Promise: every sampled token is picked exactly once, each token sees its own
context only, and no micro-batch exceeds the token budget unless one sequence alone does.
Does not cover: tensors (adapters/torch_policy.py).

A micro-batch is one flat row. Sequences of a group with the same beginning are stored as that
beginning once plus one branch each: the forward pass of the prompt, most of a short episode's
cost, is then paid once per group, and autograd sums the gradient of the branches exactly. Where
the routing to experts was recorded, a beginning is the same only with the same routing.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many

from msgspec.structs import replace

from muster.layout import UNRECORDED, Sequence
from muster.types import RoutedExperts, Value

TRUNK = -1
"""Branch number of tokens that all branches of a tree see."""


class Pick(Value, frozen=True):
    """One sampled token: the hidden state at `source` in the row predicts `target`."""

    sequence: int  # index into the sequences given
    offset: int  # place among that sequence's sampled tokens
    source: int
    target: int
    allowed: tuple[int, ...] = ()  # what it was chosen from; empty: all


class MicroBatch(Value, frozen=True):
    """One flat row. Token i attends to j ≤ i of the same tree, if j is of the trunk or of its
    own branch. `positions` are those within the original sequence."""

    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    trees: tuple[int, ...]
    branches: tuple[int, ...]
    picks: tuple[Pick, ...]
    experts: RoutedExperts | None = None  # of every token, `UNRECORDED` ids where it is not known

    @property
    def is_causal(self) -> bool:
        """True when plain causal attention is right: one tree with one branch."""
        return self.trees[-1] == 0 and max(self.branches) <= 0

    def renumbered(self, chosen: Many[int]) -> MicroBatch:
        """The same row with picks that point into the list `chosen` was taken from."""
        picks = tuple(replace(pick, sequence=chosen[pick.sequence]) for pick in self.picks)
        return replace(self, picks=picks)


class _Tree(Value, frozen=True):
    trunk: int  # length of the shared beginning
    members: tuple[int, ...]
    tokens: int


def pack(sequences: Many[Sequence], *, tokens_max: int) -> tuple[MicroBatch, ...]:
    """Micro-batches of at most `tokens_max` tokens, longest trees first.

    First-fit decreasing over trees: within a fraction of the fewest rows, and the row that needs
    most memory comes first, so a budget that is too high fails at once.
    """
    trees = sorted(_trees(sequences, tokens_max), key=lambda tree: -tree.tokens)
    rows: list[list[_Tree]] = []
    room: list[int] = []
    for tree in trees:
        fit = next((i for i, free in enumerate(room) if free >= tree.tokens), None)
        if fit is None:
            rows.append([tree])
            room.append(tokens_max - tree.tokens)
        else:
            rows[fit].append(tree)
            room[fit] -= tree.tokens
    return tuple(_flatten(sequences, row) for row in rows)


def _trees(sequences: Many[Sequence], tokens_max: int) -> Iterable[_Tree]:
    by_group: dict[str, list[int]] = {}
    for index, sequence in enumerate(sequences):
        by_group.setdefault(sequence.group, []).append(index)
    for members in by_group.values():
        # Equal beginnings lie side by side, so that each run of neighbours shares the most.
        yield from _grow(
            sequences, sorted(members, key=lambda i: _beginning(sequences[i])), tokens_max
        )


def _beginning(sequence: Sequence) -> tuple[bytes, tuple[int, ...]]:
    return _routing(sequence, 0, _context(sequence)), sequence.token_ids


def _grow(sequences: Many[Sequence], members: list[int], tokens_max: int) -> Iterable[_Tree]:
    tree: _Tree | None = None
    for index in members:
        alone = _Tree(_context(sequences[index]), (index,), len(sequences[index].token_ids))
        joined = _join(sequences, tree, index) if tree else None
        if tree and joined and joined.tokens <= min(tokens_max, tree.tokens + alone.tokens - 1):
            tree = joined
        else:
            if tree:
                yield tree
            tree = alone
    if tree:
        yield tree


def _join(sequences: Many[Sequence], tree: _Tree, index: int) -> _Tree:
    first, new = sequences[tree.members[0]], sequences[index]
    limit = min(tree.trunk, _context(new))
    trunk = 0
    while trunk < limit and first.token_ids[trunk] == new.token_ids[trunk]:
        trunk += 1
    if _routing(first, 0, trunk) != _routing(new, 0, trunk):
        differs = (i for i in range(trunk) if _routing(first, i, i + 1) != _routing(new, i, i + 1))
        trunk = next(differs)
    members = (*tree.members, index)
    return _Tree(trunk, members, trunk + sum(len(sequences[i].token_ids) - trunk for i in members))


def _routing(sequence: Sequence, start: int, end: int) -> bytes:
    """Recorded experts of these tokens; empty where the sequence has none."""
    if sequence.experts is None:
        return b""
    row = 2 * sequence.experts.layers * sequence.experts.per_token
    return sequence.experts.ids[row * start : row * end]


def _context(sequence: Sequence) -> int:
    """Tokens before the first sampled one: only these may be shared."""
    return sequence.sampled[0]


def _flatten(sequences: Many[Sequence], row: list[_Tree]) -> MicroBatch:
    ids: list[int] = []
    positions: list[int] = []
    trees: list[int] = []
    branches: list[int] = []
    picks: list[Pick] = []
    routing: list[bytes] = []
    shapes = {(e.layers, e.per_token) for e in (s.experts for s in sequences) if e}
    shape = next(iter(shapes), None)
    unknown = UNRECORDED * (shape[0] * shape[1]) if shape else b""

    def put(tree: int, branch: int, sequence: Sequence, start: int, end: int) -> None:
        ids.extend(sequence.token_ids[start:end])
        positions.extend(range(start, end))
        trees.extend([tree] * (end - start))
        branches.extend([branch] * (end - start))
        routing.append(_routing(sequence, start, end) or unknown * (end - start))

    for number, tree in enumerate(row):
        base = len(ids)
        put(number, TRUNK, sequences[tree.members[0]], 0, tree.trunk)
        for branch, member in enumerate(tree.members):
            sequence, shift = sequences[member], len(ids) - tree.trunk
            put(number, branch, sequence, tree.trunk, len(sequence.token_ids))
            for offset, at in enumerate(sequence.sampled):
                before = at - 1
                source = before + (base if before < tree.trunk else shift)
                allowed = sequence.allowed[offset] if sequence.allowed else ()
                picks.append(Pick(member, offset, source, sequence.token_ids[at], allowed))
    experts = RoutedExperts(*shape, b"".join(routing)) if shape else None
    return MicroBatch(
        tuple(ids), tuple(positions), tuple(trees), tuple(branches), tuple(picks), experts
    )
