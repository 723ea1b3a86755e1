"""Calls to replicas: what is asked at a time, what an answer says of a replica, who is asked."""

from __future__ import annotations

import asyncio
import math

import pytest

from muster.clock import monotonic
from muster.errors import Exhausted, MusterError, Unavailable
from muster.registry import Entry
from muster.tasks import end
from muster.types import EpisodeKey
from muster.v1 import inference_pb2 as inf
from services.router import events as e
from services.router.adapters.channels import Channels
from services.router.adapters.replicas import ReplicaCalls, Reply
from services.router.adapters.watching import FleetWatch
from tests.unit.router.test_conversation import Letters

KEY = EpisodeKey("r", "j-00000", 0, 0, 1)
PROBE = e.ProbeReplica("r0", "life", 5.0)


class Counted(ReplicaCalls):
    """Samplings that last until `go`, or fail at once; how many there are at a time."""

    failure: MusterError | None = None

    def __init__(self) -> None:
        super().__init__(Channels(), Letters())
        self.running, self.most, self.ended = dict[str, int](), dict[str, int](), 0
        self.go, self.many = asyncio.Event(), asyncio.Event()

    async def _sampled(self, replica: str, *given: object) -> Reply:
        if self.failure is not None:
            raise self.failure
        self.running[replica] = self.running.get(replica, 0) + 1
        self.most[replica] = max(self.most.get(replica, 0), self.running[replica])
        if sum(self.running.values()) == 8:
            self.many.set()
        await self.go.wait()
        self.running[replica] -= 1
        self.ended += 1
        raise Unavailable("nobody reads the reply to a touch")


async def test_touches_leave_places_for_turns_on_each_replica() -> None:
    calls = Counted()
    async with asyncio.TaskGroup() as tasks:
        for replica in ("r0", "r1"):
            for _ in range(20):
                tasks.create_task(calls.touch(KEY, replica, b""))
        await calls.many.wait()
        calls.go.set()
    assert calls.most == {"r0": 4, "r1": 4}
    assert calls.ended == 40


@pytest.mark.parametrize(
    ("failure", "full"),
    [(Exhausted("32 requests are running"), True), (Unavailable("no answer"), False)],
    ids=["full", "away"],
)
async def test_a_probe_tells_a_full_replica_from_one_that_fails(
    failure: MusterError, full: bool
) -> None:
    calls = Counted()
    calls.failure = failure
    probed = await calls.probe(PROBE, "r", 1)
    assert (probed.passed, probed.full) == (False, full)
    assert failure.problem in probed.detail


class Granting(ReplicaCalls):
    """A replica that is about to apply weights."""

    def _engine(self, replica: str) -> Granting:  # type: ignore[override]
        return self

    async def GrantKv(self, request: inf.GrantKvRequest, **_: float) -> inf.GrantKvResponse:
        state = inf.REPLICA_STATE_SERVING
        return inf.GrantKvResponse(life="a", state=state, ttl_s=5.0, updating=request.run == "r")


async def test_what_a_replica_says_of_an_update_reaches_the_machine() -> None:
    told = await Granting(Channels(), Letters()).grant("r", "r0", 1)
    assert isinstance(told, e.ReplicaTold)
    assert (told.serving, told.updating, told.ttl_s) == (True, True, 5.0)


@pytest.mark.parametrize("ttl_s", [0.0, -5.0, math.nan, math.inf])
async def test_a_credit_without_an_end_to_come_is_refused_and_the_way_out_named(
    ttl_s: float,
) -> None:
    class Endless(Granting):
        async def GrantKv(self, request: inf.GrantKvRequest, **_: float) -> inf.GrantKvResponse:
            return inf.GrantKvResponse(life="a", ttl_s=ttl_s)

    told = await Endless(Channels(), Letters()).grant("r", "r0", 1)
    assert isinstance(told, e.ReplicaSilent)
    assert "ttl_s" in told.detail
    assert "inference.credit_ttl_s" in told.detail


class Asked:
    """Calls that remember who was asked for a credit."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.replicas = self

    async def grant(self, run: str, replica: str, owner_epoch: int) -> e.ReplicaSilent:
        self.asked.append(replica)
        return e.ReplicaSilent(replica, "")


class Meeting(Asked):
    """Replicas that know an owner only once all of them were asked."""

    def __init__(self, count: int):
        super().__init__()
        self.all = asyncio.Barrier(count)

    async def claim(self, run: str, replica: str, owner_epoch: int) -> bool:
        await self.all.wait()
        self.asked.append(replica)
        return True


async def test_one_that_does_not_answer_a_claim_keeps_no_other_waiting() -> None:
    calls = Meeting(3)
    watch = FleetWatch(None, calls, "r", 1, asyncio.Queue[e.RouterEvent]().put)  # type: ignore[arg-type]
    async with asyncio.timeout(10):
        await watch._claim([Entry("inference", f"r{n}", "a:1") for n in range(3)], [])
    assert set(calls.asked) == {"r0", "r1", "r2"}


async def test_a_replica_that_is_no_longer_announced_is_asked_for_a_while_yet() -> None:
    calls, fed = Asked(), asyncio.Queue[e.RouterEvent]()
    watch = FleetWatch(None, calls, "r", 1, fed.put)  # type: ignore[arg-type]
    now = monotonic()
    watch._are(("a", "b", "c"), now - 1000)
    watch._are(("a", "b"), now - 61)
    watch._are(("a",), now - 30)
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(watch.ask())
        told = {(await fed.get()).replica for _ in range(2)}  # type: ignore[union-attr]
        await end(asking)
    assert told == {"a", "b"} == set(calls.asked)
