"""What the router keeps of a conversation, and for how long."""

from __future__ import annotations

import asyncio
import threading

import msgspec
import pytest

from muster.errors import Unavailable
from muster.types import EpisodeKey, SamplingParams, SegmentKind
from muster.v1 import common_pb2 as pb
from muster.v1 import inference_pb2 as inf
from services.router import events as e
from services.router.adapters.calls import Calls
from services.router.adapters.clocks import Clocks
from services.router.adapters.reach import reached
from services.router.blocks import BlockChain
from services.router.context import Context, Parts
from tests.unit.router.test_conversation import END, Letters

KEY = EpisodeKey("r", "j-00000", 0, 0, 1)
ASK = e.Generate(KEY, "r0", 0, 0, (e.Message("user", "go"),), 64, 2048, SamplingParams(), 5.0)


async def no_archive(digest: str) -> bytes:
    raise AssertionError(digest)


AGAIN = msgspec.structs.replace(ASK, replica="r1", retry=1, messages=())
GIVEN_UP = e.AbortGenerate(KEY, "r0", 0, 0)


class Replied(Calls):
    """Replicas that answer at once; `slow`: they wait for `go`. `dropped`: the episode ends."""

    dropped = False
    slow = ""

    async def _sample(self, command: e.Generate, context: Parts, room: int):  # type: ignore[no-untyped-def]
        if self.dropped:
            self.drop(command.episode)
        if command.replica == self.slow:
            self.asked.set()
            await self.go.wait()
        span = pb.VersionSpan(version=0, start=0, end=2)
        finish = inf.GenerateFinish(reason=inf.FINISH_REASON_STOP, spans=[span])
        return ((ord("x"), END), (-0.5, -0.5)), finish

    def hold(self, replica: str) -> None:
        self.slow, self.asked, self.go = replica, asyncio.Event(), asyncio.Event()


def calls(clocks: Clocks | None = None, *, block_tokens: int = 128) -> Replied:
    return Replied(
        Letters(), no_archive, box_start_timeout_s=1.0, clocks=clocks, block_tokens=block_tokens
    )


async def test_a_reply_that_comes_after_the_end_leaves_nothing_behind() -> None:
    late = calls()
    late.dropped = True
    assert isinstance(await late.generate(ASK), e.GenerateFailed)
    assert not late.usage


class Slowly(Letters):
    """Encodes once it may: for a thread."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def encode(self, text: str, *, special: bool) -> list[int]:
        self.go.wait(5.0)
        return super().encode(text, special=special)


@pytest.mark.parametrize("by", ["abort", "another"])
async def test_a_turn_that_is_given_up_while_its_opening_is_encoded_is_opened_once(by: str) -> None:
    codec = Slowly()
    world = Replied(codec, no_archive, box_start_timeout_s=1.0)
    ask = msgspec.structs.replace(ASK, messages=(e.Message("user", "a" * 1500),), context_max=4096)
    again = msgspec.structs.replace(AGAIN, context_max=4096)
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(world.generate(ask))
        await asyncio.sleep(0)  # it has asked for its opening
        if by == "abort":
            world._asked.pop(KEY.id)
        second = tasks.create_task(world.generate(again))
        await asyncio.sleep(0)
        assert not second.done()
        codec.go.set()
    answer = second.result()
    assert isinstance(first.result(), e.GenerateFailed)
    assert isinstance(answer, e.Generated)
    assert answer.prompt_tokens > 1500
    assert [s.kind for s in world.conversation(KEY).take_segments()] == [
        SegmentKind.PROMPT,
        SegmentKind.MODEL,
    ]


async def given_up(world: Replied, by: str) -> e.RouterEvent:
    """The answer of a request that was aborted, or asked of another replica, while it ran."""
    world.hold("r0")
    async with asyncio.TaskGroup() as tasks:
        late = tasks.create_task(world.generate(ASK))
        await world.asked.wait()
        if by == "abort":
            await world.abort(GIVEN_UP)
        else:
            assert isinstance(await world.generate(AGAIN), e.Generated)
        world.go.set()
    return late.result()


async def test_a_reply_of_an_aborted_request_enters_nothing() -> None:
    world = calls()
    late = await given_up(world, "abort")
    assert isinstance(late, e.GenerateFailed)
    assert (late.retry, late.replica) == (0, "r0")
    assert not world.usage
    assert [s.kind for s in world.conversation(KEY).take_segments()] == [SegmentKind.PROMPT]


async def test_a_reply_that_another_replica_gave_before_is_the_only_one_that_counts() -> None:
    world = calls()
    assert isinstance(await given_up(world, "another replica"), e.GenerateFailed)
    kinds = [s.kind for s in world.conversation(KEY).take_segments()]
    assert kinds == [SegmentKind.PROMPT, SegmentKind.MODEL]


@pytest.mark.parametrize("by", ["abort", "another replica"])
async def test_a_reply_that_nobody_heard_of_before_it_was_given_up_is_taken_back(by: str) -> None:
    world = calls(block_tokens=4)
    assert isinstance(await world.generate(ASK), e.Generated)
    if by == "abort":
        await world.abort(GIVEN_UP)
        assert not world.usage
    told = await world.generate(AGAIN)
    assert isinstance(told, e.Generated)
    kinds = [s.kind for s in world.conversation(KEY).take_segments()]
    assert kinds == [SegmentKind.PROMPT, SegmentKind.MODEL]


async def test_a_failure_says_which_request_it_is_of() -> None:
    world = calls()
    world.dropped = True
    told = await world.generate(msgspec.structs.replace(ASK, retry=2))
    assert isinstance(told, e.GenerateFailed)
    assert told.retry == 2


async def test_an_answer_says_which_request_it_is_of_and_what_lies_in_the_cache_after_it() -> None:
    world = calls(block_tokens=8)
    told = await world.generate(msgspec.structs.replace(ASK, retry=2))
    assert isinstance(told, e.Generated)
    size = told.prompt_tokens + told.sampled_tokens
    assert (told.retry, told.version) == (2, 0)
    assert told.boundary_tokens == (size - 1) // 8 * 8
    assert told.boundary > 0


async def test_siblings_share_the_blocks_of_their_opening_with_its_later_contexts() -> None:
    world = calls(block_tokens=8)
    opening = await world.tokens.opening(ASK.messages)
    tokens, blocks = len(opening.ids), opening.blocks
    assert len(blocks) == tokens // 8
    conversation = world.conversation(KEY)
    conversation.open(ASK.messages)
    conversation.observe(e.Message("user", "and then"))
    assert tuple(BlockChain(8).extend(Context(conversation.packed), tokens)) == blocks


async def test_a_sibling_that_begins_with_its_groups_opening_is_as_one_that_made_its_own() -> None:
    shared, own = calls(block_tokens=8), calls(block_tokens=8)
    await shared.tokens.opening(ASK.messages)
    told, alone = await shared.generate(ASK), await own.generate(ASK)
    assert isinstance(told, e.Generated)
    assert isinstance(alone, e.Generated)
    assert (told.prompt_tokens, told.boundary) == (alone.prompt_tokens, alone.boundary)
    one, other = shared.conversation(KEY), own.conversation(KEY)
    assert (one.packed, one.boundary) == (other.packed, other.boundary)
    assert one.take_segments() == other.take_segments()


async def test_the_figures_of_a_reply_are_kept_for_its_record() -> None:
    kept = calls()
    await kept.generate(ASK)
    assert kept.usage[KEY.id].sampled_tokens == 2


async def test_a_call_lasts_as_long_as_the_steady_clock_says() -> None:
    wall, steady = iter([1000.0, 1.0]), iter([50.0, 52.0])
    told = await calls(Clocks(lambda: next(wall), lambda: next(steady))).generate(ASK)
    assert isinstance(told, e.Generated)
    assert (told.start_unix_s, told.end_unix_s) == (1000.0, 1002.0)


def test_a_call_to_a_peer_that_is_not_announced_has_not_reached_it() -> None:
    with pytest.raises(Unavailable) as caught:
        calls()._host("h0")
    assert not reached(caught.value)


async def test_a_filtered_turn_without_its_mask_is_asked_for_again() -> None:
    """The trainer could not learn from it."""
    nucleus = msgspec.structs.replace(ASK, sampling=SamplingParams(top_p=0.9, top_k=5))
    failed = await calls().generate(nucleus)

    assert isinstance(failed, e.GenerateFailed)
    assert "top-p and top-k" in failed.detail


class Telling(Replied):
    """Replicas that tell masks and routing, and what they were asked."""

    async def _sample(self, command: e.Generate, context: Parts, room: int):  # type: ignore[no-untyped-def]
        sampled, finish = await super()._sample(command, context, room)
        finish.mask.CopyFrom(pb.SamplingMask(counts=b"\1\0\0\0" * 2, token_ids=b"\7\0\0\0" * 2))
        start = self.conversation(command.episode).recorded
        tokens = sum(len(part) for part in context) // 4 + 2 - start
        finish.experts.CopyFrom(pb.RoutedExperts(layers=1, per_token=1, ids=b"\5\0" * tokens))
        finish.experts_from = start
        return sampled, finish


async def test_masks_and_routing_are_recorded_with_the_turn() -> None:
    telling = Telling(Letters(), no_archive, box_start_timeout_s=1.0)
    nucleus = msgspec.structs.replace(ASK, sampling=SamplingParams(top_p=0.9, top_k=5))
    assert isinstance(await telling.generate(nucleus), e.Generated)
    prompt, model = telling.conversation(KEY).take_segments()

    assert model.mask is not None
    assert model.mask.counts == (1, 1)
    assert prompt.mask is None
    assert [s.experts and s.experts.tokens for s in (prompt, model)] == [len(prompt.token_ids), 2]
