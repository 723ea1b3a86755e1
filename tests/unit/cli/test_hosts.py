"""`muster hosts`: what sandbox hosts tell of themselves, and how their capacity is changed."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from muster import hosts, rpc
from muster.cli.hosts import _named, _wanted
from muster.errors import Exhausted, InvalidInput, NotFound
from muster.hosts import HostSeen, Times, ask, seen, set_capacity, table
from muster.registry import Entry
from muster.v1 import sandbox_pb2 as pb
from muster.v1 import sandbox_pb2_grpc
from muster.view import console

TOLD = pb.GetHostStatusResponse(
    host="h0",
    backend="native",
    capacity=pb.HostCapacity(boxes_max=32, starting_max=4, warm_max=8),
    boxes=pb.HostBoxes(in_use=5, starting=1, warm=3, waiting=2),
    counts=pb.HostCounts(
        acquired={"COLD": 1, "FORK": 2, "WARM": 9},
        steps=40,
        seconds={"step": pb.Quantiles(count=40, p50=0.012, p90=0.03, p99=0.08)},
    ),
    load=[1.5, 1.0, 0.5],
    processors=2,
)
ENTRY = Entry("sandbox", "h0", "10.0.0.1:7", {"backend": "native"})


class Host(sandbox_pb2_grpc.SandboxServiceServicer):
    """Answers as told, and remembers what it was asked to change."""

    def __init__(self) -> None:
        self.set: list[tuple[int | None, int | None]] = []
        self.refusal: Exhausted | None = None

    async def GetHostStatus(self, request: pb.GetHostStatusRequest, context: Any) -> Any:
        return TOLD

    async def SetCapacity(self, request: pb.SetCapacityRequest, context: Any) -> Any:
        if self.refusal is not None:
            raise self.refusal
        boxes_max = request.boxes_max if request.HasField("boxes_max") else None
        warm_max = request.warm_max if request.HasField("warm_max") else None
        self.set.append((boxes_max, warm_max))
        return pb.SetCapacityResponse()


@asynccontextmanager
async def served(host: Host) -> AsyncIterator[Entry]:
    add: Any = sandbox_pb2_grpc.add_SandboxServiceServicer_to_server
    async with rpc.serve("127.0.0.1:0", [(add, host)]) as server:
        yield Entry("sandbox", "h0", server.address)


def printed(*found: HostSeen) -> list[str]:
    out = io.StringIO()
    console(out).print(table(found))
    return out.getvalue().splitlines()


def test_a_row_says_how_full_and_how_fast_a_host_is() -> None:
    row = printed(seen(ENTRY, TOLD))[1].split()
    assert row[:8] == ["h0", "10.0.0.1:7", "native", "5/32", "1/4", "3/8", "2", "75%"]
    assert row[8:] == ["–", "12/80", "–", "1.5", "of", "2"]


def test_durations_and_counts_are_all_told_to_programs() -> None:
    found = seen(ENTRY, TOLD)
    assert found.seconds == {"step": Times(40, 0.012, 0.03, 0.08)}
    assert (found.acquired["WARM"], found.pool_hits, found.steps) == (9, 0.75, 40)


def test_a_host_that_gave_no_box_yet_has_no_pool_hits() -> None:
    assert seen(ENTRY, pb.GetHostStatusResponse()).pool_hits is None


async def test_a_host_that_does_not_answer_hides_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosts, "ASK_S", 0.5)
    gone = Entry("sandbox", "h1", "127.0.0.1:1")
    async with served(Host()) as entry:
        first, second = await ask([gone, entry])
    assert first.problem
    assert (second.problem, second.in_use) == ("", 5)
    assert "not asked" in printed(first, second)[1]


def test_what_a_host_calls_itself_cannot_steer_the_terminal() -> None:
    assert "\x1b" not in "".join(printed(HostSeen("h\x1b[2J", "a:1", problem="\x1b]0;x\x07")))


async def test_a_capacity_is_set_on_the_host() -> None:
    host = Host()
    async with served(host) as entry:
        await set_capacity(entry, 12)
        await set_capacity(entry, None, 3)
    assert host.set == [(12, None), (None, 3)]


async def test_a_capacity_that_the_host_refuses_is_told_with_its_way_out() -> None:
    host = Host()
    host.refusal = Exhausted("more than this host can hold", field="boxes_max", way_out="ask less")
    async with served(host) as entry:
        with pytest.raises(Exhausted) as caught:
            await set_capacity(entry, 4096)
    assert caught.value.way_out == "ask less"


@pytest.mark.parametrize("text", ["h0", "=5", "h0=", "h0=0", "h0=-1", "h0=x", "h0=5000"])
def test_a_capacity_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        _wanted("--set-capacity", [text], least=1)
    assert (caught.value.field, caught.value.value) == ("--set-capacity", text)


def test_capacities_are_by_host() -> None:
    assert _wanted("--set-warm", ["a=0", "b=c=7"], least=0) == {"a": 0, "b=c": 7}


def test_an_unknown_host_is_answered_with_the_known_ones() -> None:
    assert _named([ENTRY], "h0") is ENTRY
    with pytest.raises(NotFound) as caught:
        _named([ENTRY], "h9")
    assert "h0" in caught.value.way_out
