"""Tokens that are made before they are needed are those that would be made then."""

from __future__ import annotations

from services.router.adapters.tokens import Tokens
from services.router.carriers import Message
from services.router.conversation import Conversation
from tests.unit.router.test_conversation import Letters

LONG = "a" * 2000


def asking(text: str) -> tuple[Message, ...]:
    return (Message("user", text),)


async def test_openings_are_kept_while_there_is_room() -> None:
    tokens = Tokens(Letters(), 8)
    tokens.opening_tokens_max = 60
    first = await tokens.opening(asking("a" * 20))
    assert await tokens.opening(asking("a" * 20)) is first
    await tokens.opening(asking("b" * 20))
    assert tokens.opened(asking("a" * 20)) is None
    assert tokens.opened(asking("b" * 20)) is not None


async def test_only_the_text_that_was_expected_has_its_ids() -> None:
    tokens = Tokens(Letters(), 8)
    ids = await tokens.encoded(LONG)
    tokens.expect("one", LONG, ids)
    assert tokens.expected("other", LONG) is None
    assert tokens.expected("one", LONG + "!") is None
    tokens.expect("one", LONG, ids)
    assert tokens.expected("one", LONG) == Letters().encode(LONG, special=False)
    assert tokens.expected("one", LONG) is None


async def test_a_dropped_episode_leaves_nothing() -> None:
    tokens = Tokens(Letters(), 8)
    tokens.expect("one", LONG, await tokens.encoded(LONG))
    tokens.drop("one")
    assert tokens.expected("one", LONG) is None


async def test_a_short_text_is_not_worth_a_thread() -> None:
    assert await Tokens(Letters(), 8).encoded("short") is None


async def test_a_conversation_is_the_same_with_what_was_made_before() -> None:
    plain, helped = Conversation(Letters(), 8), Conversation(Letters(), 8)
    tokens = Tokens(Letters(), 8)
    plain.open(asking("go"))
    helped.open(asking("go"), await tokens.opening(asking("go")))
    for conversation in (plain, helped):
        conversation.reply((1, 2), (-0.5, -0.5), ())
    plain.observe(Message("user", LONG))
    helped.observe(Message("user", LONG), await tokens.encoded(LONG))
    assert helped.packed == plain.packed
    assert helped.boundary == plain.boundary
    assert helped.take_segments() == plain.take_segments()
