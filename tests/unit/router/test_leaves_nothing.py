"""A router runs for weeks: what has ended leaves nothing, neither counted nor to the collector.

Garbage in cycles is what a soak of minutes shows as growth: a full pass of the collector is rare in
a router (muster/collector.py), and a generator that it finds is only moved on.
"""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import pytest

from muster import errors, rpc
from muster.codec import pack_f32, pack_ids
from muster.types import EpisodeKey, Fate, SamplingParams
from muster.v1 import common_pb2 as pb
from muster.v1 import inference_pb2 as inf
from muster.v1 import inference_pb2_grpc
from services.router import events as e
from services.router.adapters.channels import Channels
from services.router.adapters.replicas import ReplicaCalls
from tests.unit.router.test_conversation import Letters
from tests.unit.router.world import World, generated, job

KEY = EpisodeKey("r", "j-00000", 0, 0, 1)
OF_A_CALL = ("UnaryStreamCall", "UnaryUnaryCall", "AioRpcError", "Task")


class Replica(inference_pb2_grpc.InferenceServiceServicer):
    """Answers one token, and goes on until nobody listens; `refuses`: nothing at all."""

    refuses = False

    async def Generate(self, request: Any, context: Any) -> Any:
        if self.refuses:
            raise errors.Exhausted("full")
        spans = [pb.VersionSpan(version=0, start=0, end=1)]
        finish = inf.GenerateFinish(reason=inf.FINISH_REASON_STOP, spans=spans)
        ids, logprobs = pack_ids([7]), pack_f32([-0.5])
        yield inf.GenerateResponse(token_ids=ids, logprobs=logprobs, finish=finish)
        yield inf.GenerateResponse()

    async def Abort(self, request: Any, context: Any) -> Any:
        return inf.AbortResponse(found=False)


class Ends:
    """A replica and the router's calls to it."""

    def __init__(self, replica: Replica, address: str):
        self.replica, self.channels = replica, Channels()
        self.channels.addresses_are({"r0": address}, 0.0)
        self.calls = ReplicaCalls(self.channels, Letters())

    async def ask(self, turn: int) -> None:
        command = e.Generate(KEY, "r0", turn, 0, (), 64, 2048, SamplingParams(), 5.0)
        try:
            await self.calls.sample(command, (pack_ids([1, 2]),), 8)
        except errors.Exhausted:
            assert self.replica.refuses
        await self.calls.abort(e.AbortGenerate(KEY, "r0", turn, 0))


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    replica = Replica()
    add = inference_pb2_grpc.add_InferenceServiceServicer_to_server
    async with rpc.serve("127.0.0.1:0", [(add, replica)], grace_s=0) as server:
        made = Ends(replica, server.address)
        yield made
        for channel in made.channels.addresses_are({}, 0.0) + made.channels.addresses_are({}, 1e9):
            await channel.close()


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive() -> Counter[str]:
    """Objects of the caller that only the collector could still end, or that somebody keeps."""
    names = Counter(type(one).__name__ for one in gc.get_objects())
    return Counter({name: names[name] for name in OF_A_CALL})


@pytest.mark.parametrize("refuses", [False, True], ids=["answered", "refused"])
@pytest.mark.usefixtures("uncollected")
async def test_a_request_leaves_nothing_to_the_collector(ends: Ends, refuses: bool) -> None:
    ends.replica.refuses = refuses
    for turn in range(3):  # what is made once is there then
        await ends.ask(turn)
    before = alive()
    for turn in range(3, 23):
        await ends.ask(turn)
    more = alive() - before
    assert more.total() < 10, more  # the server's end of the newest call may not be over yet


def sizes(root: object) -> Counter[str]:
    """Elements of all containers that belong to an object, by where they hang."""
    found: Counter[str] = Counter()
    seen, todo = set[int](), deque([("", root)])
    while todo:
        path, one = todo.popleft()
        if id(one) in seen or isinstance(one, type | str | bytes | int | float):
            continue
        seen.add(id(one))
        if isinstance(one, Mapping):
            found[path] += len(one)
            todo += [(f"{path}[]", value) for value in one.values()]
        elif isinstance(one, list | set | deque | tuple | frozenset):
            found[path] += len(one)
            todo += [(f"{path}[]", value) for value in one]
        else:
            slots = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
            names = {*slots, *getattr(one, "__dict__", ())}
            todo += [(f"{path}.{name}", getattr(one, name, None)) for name in sorted(names)]
    return found


class Trained(World):
    """A world whose bank trains every group as soon as it is complete."""

    def __init__(self) -> None:
        super().__init__(
            placement="predicted_finish",
            admission="kv_fit",
            probes=True,
            groups_per_batch=2,
            prefix_entries_max=64,
        )
        self.step = self.replies = 0
        self.on(e.Generate, self._reply)
        self.start(replicas=2, hosts=2)
        self._grant()

    def _grant(self) -> None:
        at = (f"life{self.step}", self.step, True, 10_000_000)
        self.feed(*(e.ReplicaTold(f"r{n}", *at, ttl_s=1e9, block_size=16) for n in range(2)))
        self.wait(1.0)

    def _reply(self, command: e.Generate) -> e.Generated:
        self.replies += 1
        return generated(
            command,
            prompt_tokens=20,
            version=self.step,
            boundary=self.replies,
            boundary_tokens=16,
        )

    def batch(self) -> None:
        """All open groups are trained, and the next version is published."""
        done = [group.id for group in self.machine._groups.open.values() if group.complete]
        assert len(done) == 2, self.machine.progress("j", self.now)
        self.step += 1
        self.feed(*(e.FateRecorded(group, Fate.TRAINED, self.step) for group in done))
        self.feed(e.BatchTrained(self.step), e.VersionPublished(self.step, self.step))
        self._grant()


def test_groups_that_are_over_leave_nothing_in_the_machine() -> None:
    world = Trained()
    world.feed(job(groups=400, size=2, max_turns=2))
    for _ in range(40):  # every window and every cache of a bounded size is full then
        world.batch()
    before = sizes(world.machine)
    for _ in range(40):
        world.batch()
    grown = {path: n - before[path] for path, n in sizes(world.machine).items() if n > before[path]}
    assert not grown, grown
