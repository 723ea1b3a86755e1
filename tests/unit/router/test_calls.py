"""What the router keeps of a conversation, and for how long."""

from __future__ import annotations

import pytest

from muster.errors import Unavailable
from muster.types import EpisodeKey, SamplingParams
from muster.v1 import common_pb2 as pb
from muster.v1 import inference_pb2 as inf
from services.router import events as e
from services.router.adapters.calls import Calls
from services.router.adapters.clocks import Clocks
from services.router.adapters.reach import reached
from tests.unit.router.test_conversation import END, Letters

KEY = EpisodeKey("r", "j-00000", 0, 0, 1)
ASK = e.Generate(KEY, "r0", 0, 0, (e.Message("user", "go"),), 64, 2048, SamplingParams(), 5.0)


async def no_archive(digest: str) -> bytes:
    raise AssertionError(digest)


class Replied(Calls):
    """A replica that answers at once; `dropped`: its episode has ended meanwhile."""

    dropped = False

    async def _sample(self, command: e.Generate, context: list[int], room: int):  # type: ignore[no-untyped-def,override]
        if self.dropped:
            self.drop(command.episode)
        span = pb.VersionSpan(version=0, start=0, end=2)
        finish = inf.GenerateFinish(reason=inf.FINISH_REASON_STOP, spans=[span])
        return ((ord("x"), END), (-0.5, -0.5)), finish


def calls(clocks: Clocks | None = None) -> Replied:
    return Replied(Letters(), no_archive, box_start_timeout_s=1.0, clocks=clocks)


async def test_a_reply_that_comes_after_the_end_leaves_nothing_behind() -> None:
    late = calls()
    late.dropped = True
    assert isinstance(await late.generate(ASK), e.Generated)
    assert not late.usage


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
        calls()._channel("h0")
    assert not reached(caught.value)
