"""The index of cached prefixes: what it finds, what it learns, what it never exceeds."""

from __future__ import annotations

from services.router.prefix import Mark, PrefixIndex

PROMPT: list[Mark] = [(11, 128), (12, 256)]  # shared by siblings
TURN_1: Mark = (21, 512)
TURN_2: Mark = (22, 1024)


def index(entries_max: int = 100) -> PrefixIndex:
    return PrefixIndex(block_tokens=128, entries_max=entries_max)


def test_a_sibling_finds_the_shared_prompt_and_not_the_others_turns() -> None:
    known = index()
    known.dispatched("a", 1, [*PROMPT, TURN_1, TURN_2])
    assert known.cached("a", 1, [*PROMPT, TURN_1, TURN_2]) == 1024
    assert known.cached("a", 1, [*PROMPT, (31, 512), (32, 1024)]) == 256
    assert known.cached("a", 1, [(41, 128), (42, 256)]) == 0
    assert known.cached("b", 1, PROMPT) == 0


def test_what_one_version_computed_is_not_anothers() -> None:
    known = index()
    known.dispatched("a", 1, PROMPT)
    assert known.cached("a", 2, PROMPT) == 0
    known.dispatched("a", 2, PROMPT[:1])
    assert (known.cached("a", 1, PROMPT), known.cached("a", 2, PROMPT)) == (256, 128)


def test_a_pushed_version_empties_one_replicas_index() -> None:
    known = index()
    for replica in "ab":
        known.dispatched(replica, 1, PROMPT)
    known.clear("a")
    known.clear("never heard of")
    assert (known.cached("a", 1, PROMPT), known.cached("b", 1, PROMPT)) == (0, 256)


def test_a_replica_that_left_leaves_nothing() -> None:
    known = index()
    known.dispatched("a", 1, PROMPT)
    known.forget("a")
    known.forget("a")
    assert (known.entries("a"), known.cached("a", 1, PROMPT)) == (0, 0)


def test_the_end_of_the_least_recently_used_chain_goes_first() -> None:
    known = index(entries_max=4)
    known.dispatched("a", 1, [*PROMPT, TURN_1])
    known.dispatched("a", 1, [(91, 128), (92, 256)])
    assert known.cached("a", 1, [*PROMPT, TURN_1]) == 256
    assert known.cached("a", 1, [(91, 128), (92, 256)]) == 256


def test_a_reply_as_predicted_teaches_nothing() -> None:
    known = index()
    known.dispatched("a", 1, PROMPT)
    known.dispatched("a", 1, [*PROMPT, TURN_1])
    assert known.corrected("a", 1, PROMPT, 256) == 0
    assert known.corrected("a", 1, PROMPT, 200) == 0  # the last token's block is computed anew
    assert known.corrected("a", 1, [], 0) == 0
    assert known.cached("a", 1, [*PROMPT, TURN_1]) == 512


def test_a_shortfall_tells_that_all_that_is_older_is_gone_too() -> None:
    known = index()
    other, later = [(51, 4096)], [(61, 4096)]
    known.dispatched("a", 1, other)
    known.dispatched("a", 1, [*PROMPT, TURN_1])
    known.dispatched("a", 1, later)
    known.dispatched("a", 1, [*PROMPT, TURN_1])  # the next turn: 512 tokens thought to be there
    assert known.corrected("a", 1, [*PROMPT, TURN_1], 128) == 384
    assert known.cached("a", 1, other) == 0
    assert known.cached("a", 1, later) == 4096
    assert known.cached("a", 1, [*PROMPT, TURN_1]) == 512  # just computed again


def test_a_whole_block_that_is_not_found_may_be_the_engines_coarser_one() -> None:
    known = index()
    known.dispatched("a", 1, [(51, 4096)])
    known.dispatched("a", 1, PROMPT)
    assert known.corrected("a", 1, PROMPT, 128) == 0
    assert known.cached("a", 1, [(51, 4096)]) == 4096


def test_what_was_used_again_outlives_what_was_used_before() -> None:
    known = index(entries_max=4)
    known.dispatched("a", 1, PROMPT)
    known.dispatched("a", 1, [(91, 128), (92, 256)])
    known.dispatched("a", 1, PROMPT)
    known.dispatched("a", 1, [(93, 128)])
    assert known.cached("a", 1, PROMPT) == 256
    assert known.cached("a", 1, [(91, 128), (92, 256)]) == 128


def test_what_was_last_used_with_a_cache_that_is_gone_is_gone_as_well() -> None:
    known = index()
    known.dispatched("a", 1, [*PROMPT, TURN_1, (51, 4096)])
    known.dispatched("a", 1, [*PROMPT, TURN_1])
    assert known.corrected("a", 1, [*PROMPT, TURN_1], 0) == 512
    assert known.entries("a") == 3


def test_a_shortfall_of_an_unknown_cache_is_only_counted() -> None:
    known = index()
    assert known.corrected("gone", 1, [*PROMPT, TURN_1], 0) == 512


def test_twenty_thousand_conversations_leave_no_more_than_the_bound() -> None:
    """ai-dynamo/dynamo issue 11678: blocks that were removed stayed in the index for ever."""
    known = index(entries_max=500)
    for episode in range(20_000):
        replica = f"replica-{episode % 4}"
        marks = [(episode << 8 | turn, 128 * (turn + 1)) for turn in range(5)]
        known.dispatched(replica, episode // 5_000, marks)
        known.corrected(replica, episode // 5_000, marks, 0 if episode % 97 == 0 else 640)
    assert all(known.entries(f"replica-{r}") <= 500 for r in range(4))
