"""Stream messages as events, records as messages, and what cannot be read."""

from __future__ import annotations

import asyncio

import pytest
import zstandard

from muster import codec, payload
from muster.errors import InvalidInput, MusterError, Refused
from muster.streams import Received
from muster.v1 import common_pb2 as pb
from muster.v1 import events_pb2 as ev
from muster.v1 import readybank_pb2 as rb
from services.readybank import events as e
from services.readybank.adapters import feed, payloads
from sim.builders import INFRA, key, scored

BATCH = e.Batch(3, (e.BatchMember("g", (0, 2)), e.BatchMember("h", (1, 0))), 10.5, 11.25, 4, 2)


def _received(stream: str, data: bytes) -> Received:
    return Received(stream, "1700000000250-3", data, "")


def test_a_batch_record_comes_back_equal() -> None:
    frozen = feed.frozen_entry("run", BATCH)
    trained = feed.trained_entries("run", BATCH, ())[-1]
    messages = [feed.batch_record(_received("batches", entry.data)) for entry in (frozen, trained)]
    assert feed.restored_batches(messages[:1]) == [e.BatchRestored(BATCH, False)]
    assert feed.restored_batches(messages) == [e.BatchRestored(BATCH, True)]
    # Either record names the members: a lost frozen one alone loses nothing.
    assert feed.restored_batches(messages[1:]) == [e.BatchRestored(BATCH, True)]
    assert (frozen.dedupe, trained.dedupe) == ("3/frozen", "3/trained")


def test_an_event_carries_the_time_that_the_stream_gave_it() -> None:
    label = codec.label_to_pb(key("g", 1), scored(0.5))
    found = feed.event_of(_received("outcomes", label.SerializeToString()))
    assert found == e.LabelRecorded(key("g", 1), scored(0.5), 1700000000.25, "1700000000250-3")


def test_only_a_cancelled_job_is_an_event() -> None:
    jobs = [ev.JobRecord(job="j", cancelled=cancelled) for cancelled in (False, True)]
    found = [feed.event_of(_received("jobs", job.SerializeToString())) for job in jobs]
    assert found == [None, e.JobCancelled("j")]


@pytest.mark.parametrize(
    ("stream", "data"),
    [
        ("events", b"\xff\xff\xff"),
        ("outcomes", ev.OutcomeLabel(episode=pb.EpisodeKey(group="g")).SerializeToString()),
        ("versions", b""),
    ],
)
def test_an_unreadable_message_is_refused_whole(stream: str, data: bytes) -> None:
    with pytest.raises(InvalidInput):
        feed.event_of(_received(stream, data))


def test_an_empty_entry_is_no_batch() -> None:
    with pytest.raises(InvalidInput):
        feed.batch_record(_received("batches", b""))


class _Payloads:
    """Stands where RunStreams stands, for reading payloads."""

    run = "run"

    def __init__(self, data: bytes | None):
        self._data = data

    async def payloads(self, keys: tuple[str, ...]) -> list[bytes | None]:
        return [self._data for _ in keys]


async def _sent(streams: _Payloads, group: e.LeasedGroup) -> list[rb.LeasedTrajectory]:
    windows: asyncio.Queue[payloads.Window | MusterError] = asyncio.Queue()
    await payloads.read(streams, [group], windows)  # type: ignore[arg-type]
    found = []
    while not windows.empty():
        window = windows.get_nowait()
        assert not isinstance(window, MusterError)
        for part in payloads.parts("run", window):
            for turn in part.trajectory.turns:
                payload.unpacked(turn.key, turn.payload)  # as the reader of a lease does
            found.append(part.trajectory)
    assert window == ([], {})
    return found


def _bomb() -> bytes:
    return zstandard.ZstdCompressor().compress(bytes(payload.BYTES_MAX + 1))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (None, "gone"),
        (b"not zstd", "cannot be read"),
        (zstandard.ZstdCompressor().compress(b"\xff\xff"), "cannot be read"),
        (_bomb(), "too large"),
    ],
)
async def test_tokens_that_cannot_be_had_are_named(data: bytes | None, problem: str) -> None:
    sibling = e.LeasedSibling(0, 0, scored(1.0), ("p:key",))
    group = e.LeasedGroup("g", "task", codec.sampling_from_pb(pb.SamplingParams()), (sibling,))
    with pytest.raises(Refused, match=problem) as caught:
        await _sent(_Payloads(data), group)
    assert caught.value.value == "p:key"


async def test_turns_travel_byte_for_byte_under_their_keys() -> None:
    turns = [ev.TurnPayload(segments=[pb.Segment(token_ids=bytes([n]) * 4)]) for n in range(2)]
    packed = [zstandard.ZstdCompressor().compress(t.SerializeToString()) for t in turns]
    sibling = e.LeasedSibling(0, 0, scored(1.0), ("p:0", "p:1"))
    group = e.LeasedGroup("g", "task", codec.sampling_from_pb(pb.SamplingParams()), (sibling,))

    class Both(_Payloads):
        async def payloads(self, keys: tuple[str, ...]) -> list[bytes | None]:
            return [packed[int(key[-1])] for key in keys]

    (sent,) = await _sent(Both(None), group)
    assert [(t.key, t.payload) for t in sent.turns] == [("p:0", packed[0]), ("p:1", packed[1])]
    assert [payload.unpacked(t.key, t.payload) for t in sent.turns] == turns


async def test_an_episode_that_fits_no_message_names_the_turn_that_is_too_much() -> None:
    half = zstandard.ZstdCompressor().compress(bytes(payload.BYTES_MAX // 2))
    sibling = e.LeasedSibling(0, 0, scored(1.0), ("p:0", "p:1"))
    group = e.LeasedGroup("g", "task", codec.sampling_from_pb(pb.SamplingParams()), (sibling,))
    with pytest.raises(Refused, match="too large") as caught:
        await _sent(_Payloads(half), group)
    assert caught.value.value == "p:1"


async def test_an_invalid_sibling_travels_with_its_label_and_without_tokens() -> None:
    sibling = e.LeasedSibling(1, 2, INFRA, ())
    group = e.LeasedGroup("g", "task", codec.sampling_from_pb(pb.SamplingParams()), (sibling,))
    (sent,) = await _sent(_Payloads(None), group)
    assert (sent.sibling, sent.attempt, len(sent.turns)) == (1, 2, 0)
    assert codec.label_from_pb(sent.label) == INFRA


async def test_many_siblings_come_in_order_with_few_in_memory() -> None:
    data = zstandard.ZstdCompressor().compress(ev.TurnPayload().SerializeToString())
    siblings = tuple(e.LeasedSibling(n, 0, scored(1.0), (f"p:{n}",)) for n in range(21))
    group = e.LeasedGroup("g", "task", codec.sampling_from_pb(pb.SamplingParams()), siblings)
    asked: list[int] = []

    class Counted(_Payloads):
        async def payloads(self, keys: tuple[str, ...]) -> list[bytes | None]:
            asked.append(len(keys))
            return await super().payloads(keys)

    assert [t.sibling for t in await _sent(Counted(data), group)] == list(range(21))
    assert max(asked) <= payloads.AHEAD
