"""The service over gRPC, with a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from muster import codec, rpc, segment_codec
from muster.errors import Exhausted, Fenced, InvalidInput, Unavailable
from muster.fingerprint import fingerprint_from_pb, text
from muster.transfer.active import ActiveRequests
from muster.transfer.group import GroupSpec
from muster.transfer.manifest import Manifest
from muster.types import FinishReason, SamplingParams, VersionSpan
from muster.v1 import common_pb2 as common
from muster.v1 import inference_pb2 as pb
from muster.v1.inference_pb2_grpc import (
    InferenceServiceStub,
    add_InferenceServiceServicer_to_server,
)
from services.inference.adapters.fake import FakeEngine, Script
from services.inference.driver import ReplicaDriver
from services.inference.engine import CommitFigures, UpdatePhase
from services.inference.replica import Bounds, Replica
from services.inference.server import InferenceServicer

if TYPE_CHECKING:
    from muster.v1.inference_pb2_grpc import InferenceServiceAsyncStub


PLAIN = SamplingParams()


async def until(check: Callable[[], bool]) -> None:
    """Yield to the loop until `check` holds; bounded."""
    async with asyncio.timeout(5):
        while not check():  # noqa: ASYNC110 - the code under test has no event for it
            await asyncio.sleep(0)


class World:
    def __init__(self, engine: FakeEngine, driver: ReplicaDriver, stub: InferenceServiceAsyncStub):
        self.engine, self.driver, self.stub = engine, driver, stub

    async def generate(self, name: str = "g.0.0.0", **change: Any) -> list[pb.GenerateResponse]:
        with rpc.calling("generate"):
            return [r async for r in self.stub.Generate(request(name, **change), timeout=10)]


def request(
    name: str = "g.0.0.0",
    *,
    epoch: int = 1,
    max_tokens: int = 5,
    params: SamplingParams = PLAIN,
    experts_from: int = 0,
) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        episode=common.EpisodeKey(run="main", group="g", owner_epoch=epoch),
        request_id=name,
        prompt_token_ids=codec.pack_ids([1, 2, 3]),
        sampling=codec.sampling_to_pb(params),
        max_tokens=max_tokens,
        experts_from=experts_from,
    )


@asynccontextmanager
async def serving(script: Script | None = None, *, started: bool = True) -> AsyncIterator[World]:
    engine = FakeEngine(script)
    replica = Replica("main", Bounds(requests_max=2, scores_max=1, tokens_max=2048), life="one")
    async with ReplicaDriver(replica, engine, receive_timeout_s=30.0) as driver:
        if started:
            await driver.start(4)
        services = [(add_InferenceServiceServicer_to_server, InferenceServicer("one", driver))]
        async with (
            rpc.serve("127.0.0.1:0", services) as server,
            rpc.channel(server.address) as channel,
        ):
            stub: InferenceServiceAsyncStub = InferenceServiceStub(channel)
            yield World(engine, driver, stub)


async def test_tokens_come_as_they_are_sampled_and_the_finish_last() -> None:
    async with serving(Script(replies=((7, 8, 9),))) as world:
        *chunks, last = await world.generate(max_tokens=3)

    assert [codec.unpack_ids(c.token_ids) for c in chunks] == [[7], [8], [9]]
    assert all(len(codec.unpack_f32(c.logprobs)) == 1 for c in chunks)
    assert codec.finish_from_pb(last.finish.reason) is FinishReason.LENGTH
    assert codec.spans_from_pb(last.finish.spans) == (VersionSpan(4, 0, 3, 4),)


async def test_a_switch_of_versions_is_in_the_spans() -> None:
    async with serving(Script(switch={2: 5})) as world:
        responses = await world.generate(max_tokens=5)

    spans = codec.spans_from_pb(responses[-1].finish.spans)
    assert spans == (VersionSpan(4, 0, 2, 4), VersionSpan(5, 2, 5, 5))


async def test_a_starting_replica_says_so_and_serves_nothing() -> None:
    async with serving(started=False) as world:
        status = await world.stub.GetReplicaStatus(pb.GetReplicaStatusRequest(), timeout=5)
        assert status.state == pb.REPLICA_STATE_STARTING
        with pytest.raises(Unavailable, match="starting"):
            await world.generate()


async def test_a_fenced_replica_says_so_and_serves_nothing() -> None:
    async with serving() as world:
        fence = pb.AbortWeightUpdateRequest(run="main", trainer_epoch=1, version=5, fence=True)
        answer = await world.stub.AbortWeightUpdate(fence, timeout=5)

        assert answer.serving_version == 4
        status = await world.stub.GetReplicaStatus(pb.GetReplicaStatusRequest(), timeout=5)
        assert (status.state, status.version) == (pb.REPLICA_STATE_FENCED, 4)
        assert "version 5 is served elsewhere" in status.update_error
        with pytest.raises(Unavailable, match="fenced"):
            await world.generate()


async def test_an_aborted_update_without_a_fence_changes_nothing() -> None:
    async with serving() as world:
        abort = pb.AbortWeightUpdateRequest(run="main", trainer_epoch=1, version=5)
        await world.stub.AbortWeightUpdate(abort, timeout=5)

        await world.generate()


async def test_a_former_router_is_fenced() -> None:
    async with serving() as world:
        await world.generate("a", epoch=2)

        with pytest.raises(Fenced, match="owner epoch 2"):
            await world.generate("b", epoch=1)


async def test_a_claim_ends_the_requests_of_the_former_router_and_refuses_it() -> None:
    async with serving(Script(wedged=True)) as world:
        async with asyncio.TaskGroup() as tasks:

            async def former() -> None:
                with pytest.raises(Fenced, match="owner epoch 2"):
                    await world.generate("a", epoch=1)

            tasks.create_task(former())
            await until(lambda: world.engine.load().running == 1)
            claim = pb.ClaimReplicaRequest(run="main", owner_epoch=2)
            assert (await world.stub.ClaimReplica(claim, timeout=5)).aborted == 1
        with pytest.raises(Fenced):
            await world.generate("a", epoch=1)
        world.engine.rescript(Script())
        await world.generate("a", epoch=2)
        status = await world.stub.GetReplicaStatus(pb.GetReplicaStatusRequest(), timeout=5)
        assert status.fenced_calls == 2


async def test_a_router_that_calls_first_and_claims_nothing_is_the_owner_all_the_same() -> None:
    async with serving(Script(wedged=True)) as world, asyncio.TaskGroup() as tasks:

        async def former() -> None:
            with pytest.raises(Fenced):
                await world.generate("a", epoch=1)

        tasks.create_task(former())
        await until(lambda: world.engine.load().running == 1)
        world.engine.rescript(Script())
        await world.generate("a", epoch=2)  # the same turn, asked for again


async def test_requests_above_the_bound_are_refused_and_the_place_comes_back() -> None:
    async with serving(Script(wedged=True)) as world:
        running = [world.stub.Generate(request(name), timeout=10) for name in ("a", "b")]
        async with asyncio.TaskGroup() as tasks:
            reads = [tasks.create_task(anext(aiter(call))) for call in running]
            await until(lambda: world.engine.load().running == 2)
            with pytest.raises(Exhausted, match="2 requests"):
                await world.generate("c")
            key = common.EpisodeKey(run="main", group="g", owner_epoch=1)
            for name in ("a", "b"):
                answer = await world.stub.Abort(
                    pb.AbortRequest(episode=key, request_id=name), timeout=5
                )
                assert answer.found
        assert all(
            codec.finish_from_pb(read.result().finish.reason) is FinishReason.ABORT
            for read in reads
        )
        for call in running:
            call.cancel()
        world.engine.rescript(Script())
        await world.generate("d")


async def test_a_caller_that_goes_away_ends_its_request() -> None:
    async with serving(Script(length=100_000, step_s=0.001)) as world:
        call = world.stub.Generate(request(max_tokens=2000), timeout=10)
        await anext(aiter(call))
        call.cancel()

        await until(lambda: world.engine.load().running == 0)


async def test_an_engine_that_fails_is_unavailable_and_the_place_comes_back() -> None:
    async with serving(Script(fail=frozenset({"sample"}))) as world:
        for _ in range(3):
            with pytest.raises(Unavailable, match="asked to fail"):
                await world.generate()


async def test_a_bad_request_names_its_field() -> None:
    async with serving() as world:
        with pytest.raises(InvalidInput) as refused:
            await world.generate(max_tokens=5000)

    assert refused.value.field == "inference.max_model_len"
    assert refused.value.way_out


async def test_scores_carry_the_version_that_gave_them() -> None:
    async with serving() as world:
        ids = codec.pack_ids([1, 2, 3])
        answer = await world.stub.Score(pb.ScoreRequest(token_ids=ids, temperature=1.0), timeout=5)

    assert len(codec.unpack_f32(answer.logprobs)) == 2
    assert answer.version == 4


async def test_a_caller_that_gives_up_does_not_cut_an_apply() -> None:
    entered, go_on = asyncio.Event(), asyncio.Event()

    class Slow(FakeEngine):
        async def commit_update(
            self, version: int, active: ActiveRequests = ActiveRequests.RECOMPUTE
        ) -> CommitFigures:
            entered.set()
            await go_on.wait()
            return await super().commit_update(version, active)

    replica = Replica("main", Bounds(requests_max=2, scores_max=1, tokens_max=2048), life="one")
    engine = Slow()
    async with ReplicaDriver(replica, engine, receive_timeout_s=30.0) as driver:
        await driver.start(4)
        await engine.prepare_update(
            Manifest(5, 4, (), "", 0), GroupSpec("gloo", "127.0.0.1", 1, 1, 2, "g", 10.0)
        )
        await until(lambda: engine._update.phase is UpdatePhase.STAGED)
        async with asyncio.TaskGroup() as tasks:
            caller = tasks.create_task(driver.commit("main", 1, 5))
            await entered.wait()
            caller.cancel()
        go_on.set()
        await until(lambda: replica.version == 5)

    assert replica.why_fenced == ""


async def grant(world: World, epoch: int = 1) -> pb.GrantKvResponse:
    with rpc.calling("grant"):
        return await world.stub.GrantKv(pb.GrantKvRequest(run="main", owner_epoch=epoch), timeout=5)


async def test_a_replica_grants_its_cache_and_tells_how_it_is() -> None:
    async with serving(Script(kv_tokens=5000, block=32)) as world:
        await world.generate(max_tokens=5)
        told = await grant(world)

    assert (told.credit_tokens, told.block_size, told.version) == (5000, 32, 4)
    assert (told.state, told.running, told.steps) == (pb.REPLICA_STATE_SERVING, 0, 5)
    assert told.life == "one"
    assert told.ttl_s > 0
    assert not told.updating


async def test_while_weights_are_applied_a_replica_tells_so() -> None:
    async with serving(Script()) as world:
        world.driver.replica.begin_commit()
        told = await grant(world)
    assert told.updating


async def test_a_wedged_engine_still_tells_that_its_steps_stand_still() -> None:
    async with serving(Script(wedged=True)) as world, asyncio.TaskGroup() as tasks:
        hanging = tasks.create_task(world.generate())
        await until(lambda: world.engine.load().running == 1)
        told = [await grant(world), await grant(world)]
        assert [(t.running, t.steps) for t in told] == [(1, 0), (1, 0)]
        await world.driver.abort(codec.key_from_pb(request().episode), "g.0.0.0")
        await hanging


async def test_a_question_of_a_newer_router_ends_what_the_former_one_runs() -> None:
    async with serving(Script(wedged=True)) as world:
        async with asyncio.TaskGroup() as tasks:
            orphan = tasks.create_task(_fenced(world))
            await until(lambda: world.engine.load().running == 1)
            await grant(world, epoch=2)
            await orphan
        assert world.engine.load().running == 0
        with pytest.raises(Fenced):
            await grant(world, epoch=1)


async def _fenced(world: World) -> None:
    with pytest.raises(Fenced):
        await world.generate()


async def test_a_caller_that_goes_away_leaves_nothing_running() -> None:
    async with serving(Script(wedged=True)) as world:
        call = world.stub.Generate(request(), timeout=10)
        await until(lambda: world.engine.load().running == 1)
        call.cancel()
        await until(lambda: world.engine.load().running == 0)
        assert world.driver.replica.requests == ()


async def test_a_replica_tells_what_its_figures_depend_on() -> None:
    async with serving() as world:
        status = await world.stub.GetReplicaStatus(pb.GetReplicaStatusRequest(), timeout=5)

    assert fingerprint_from_pb(status.serving) == world.engine.fingerprint
    assert status.fingerprint == text(world.engine.fingerprint)


async def test_a_filtered_request_comes_with_what_it_was_chosen_from() -> None:
    async with serving(Script(replies=((7, 8, 9),))) as world:
        *_, last = await world.generate(max_tokens=3, params=SamplingParams(top_p=0.9, top_k=4))
        *_, plain = await world.generate("another", max_tokens=3)

    mask = segment_codec.mask_from_pb(last.finish.mask)
    assert mask.counts == (4, 4, 4)
    assert mask.token_ids[::4] == (7, 8, 9)
    assert not plain.finish.HasField("mask")


async def test_a_replica_that_tells_no_masks_refuses_what_would_need_them() -> None:
    async with serving(Script(mask_ids_max=0)) as world:
        with pytest.raises(InvalidInput, match="does not tell"):
            await world.generate(params=SamplingParams(top_p=0.9, top_k=4))
        await world.generate("probe", params=SamplingParams(top_k=1))


async def test_routing_is_of_the_tokens_that_the_caller_does_not_know() -> None:
    async with serving(Script(replies=((7, 8, 9),), experts=(2, 2))) as world:
        *_, whole = await world.generate(max_tokens=3)
        *_, later = await world.generate("another", max_tokens=3, experts_from=2)

    of_all = segment_codec.experts_from_pb(whole.finish.experts)
    of_some = segment_codec.experts_from_pb(later.finish.experts)
    assert (of_all.tokens, of_some.tokens) == (6, 4)
    assert later.finish.experts_from == 2
    assert of_all.ids[2 * 8 :] == of_some.ids


async def test_a_place_behind_the_context_is_its_end() -> None:
    async with serving(Script(replies=((7, 8, 9),), experts=(2, 2))) as world:
        *_, last = await world.generate(max_tokens=3, experts_from=1 << 30)

    assert last.finish.experts_from == 3
    assert segment_codec.experts_from_pb(last.finish.experts).tokens == 3
