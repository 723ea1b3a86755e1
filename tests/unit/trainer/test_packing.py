"""Micro-batches hold every sampled token once, in its own context, without padding."""

from __future__ import annotations

from muster.layout import Sequence, lay_out
from services.trainer.packing import MicroBatch, pack
from tests.unit.trainer.stories import observed, prompt, sampled, trajectory


def sequence(group: str, context: tuple[int, ...], tail: tuple[int, ...]) -> Sequence:
    return lay_out(0, trajectory(group, 0, 1.0, [prompt(*context), sampled(*tail)]))[0]


def visible(row: MicroBatch, at: int) -> list[tuple[int, int]]:
    """(position, token) pairs that token `at` attends to, by the rule of MicroBatch."""
    return [
        (row.positions[j], row.token_ids[j])
        for j in range(at + 1)
        if row.trees[j] == row.trees[at] and row.branches[j] in (-1, row.branches[at])
    ]


def check(sequences: list[Sequence], rows: tuple[MicroBatch, ...]) -> None:
    """Each pick sees exactly the tokens before it, at their positions, and is there once."""
    found = {}
    for row in rows:
        for pick in row.picks:
            found[pick.sequence, pick.offset] = (visible(row, pick.source), pick.target)
    expected = {
        (i, offset): (list(enumerate(s.token_ids[:at])), s.token_ids[at])
        for i, s in enumerate(sequences)
        for offset, at in enumerate(s.sampled)
    }
    assert found == expected
    assert sum(len(row.picks) for row in rows) == len(expected)


def test_siblings_share_their_prompt() -> None:
    sequences = [sequence("g", (1, 2, 3), (9, 8)), sequence("g", (1, 2, 3), (7,))]
    rows = pack(sequences, tokens_max=100)
    check(sequences, rows)
    assert [len(row.token_ids) for row in rows] == [3 + 2 + 1]


def test_equal_samples_stay_apart() -> None:
    sequences = [sequence("g", (1, 2), (9,)), sequence("g", (1, 2), (9,))]
    rows = pack(sequences, tokens_max=100)
    check(sequences, rows)
    assert len(rows[0].picks) == 2


def test_other_groups_are_another_tree_of_the_same_row() -> None:
    """Equal prompts of two groups are never merged."""
    sequences = [sequence("a", (1, 2), (9,)), sequence("b", (1, 2), (9,))]
    rows = pack(sequences, tokens_max=100)
    check(sequences, rows)
    assert [len(row.token_ids) for row in rows] == [2 * (2 + 1)]


def test_contexts_that_part_early_share_what_they_can() -> None:
    sequences = [sequence("g", (1, 2, 3), (9,)), sequence("g", (1, 5), (9,))]
    rows = pack(sequences, tokens_max=100)
    check(sequences, rows)
    assert len(rows[0].token_ids) == 1 + 3 + 2


def test_later_turns_belong_to_their_branch() -> None:
    segments = [prompt(1, 2), sampled(3), observed(4, 5), sampled(6, 7)]
    sequences = [
        lay_out(0, trajectory("g", 0, 1.0, segments))[0],
        sequence("g", (1, 2), (3, 8)),
    ]
    check(sequences, pack(sequences, tokens_max=100))


def test_a_group_over_the_budget_is_split_and_keeps_its_context() -> None:
    sequences = [sequence("g", (1, 2, 3, 4), (9, i)) for i in range(5)]
    rows = pack(sequences, tokens_max=8)
    check(sequences, rows)
    assert all(len(row.token_ids) <= 8 for row in rows)


def test_a_sequence_over_the_budget_stands_alone() -> None:
    sequences = [sequence("g", tuple(range(20)), (9,)), sequence("h", (1,), (2,))]
    rows = pack(sequences, tokens_max=8)
    check(sequences, rows)
    assert [len(row.token_ids) for row in rows] == [21, 2]


def test_a_single_sequence_needs_no_mask() -> None:
    (row,) = pack([sequence("g", (1, 2), (3,))], tokens_max=8)
    assert row.is_causal


def test_shared_rows_need_a_mask() -> None:
    (row,) = pack([sequence("g", (1, 2), (3,)), sequence("g", (1, 2), (4,))], tokens_max=8)
    assert not row.is_causal
