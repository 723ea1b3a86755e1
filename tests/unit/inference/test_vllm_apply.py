"""An apply that fails half way, with the real receiver and shadow on a tiny model.

vLLM's code is imported but no engine runs: a stand-in for AsyncLLM hands its verbs straight to the
receiver. So what is tested is our half: the receiver, the shadow, the adapter, the fence; that
vLLM carries an exception of its worker to the caller is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from muster.errors import Refused, Unavailable
from muster.transfer.receiving import Staging
from muster.transfer.snapshot import Snapshot
from muster.types import EpisodeKey, SamplingParams
from services.inference.config import InferenceConfig
from services.inference.driver import ReplicaDriver
from services.inference.engine import Sampling
from services.inference.replica import Bounds, Replica, State

pytest.importorskip("vllm")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM and torch warn at import
OLD, NEW = 1.0, 2.0


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver of a CPU engine; what arrives is the stream that it is given as its source."""
    from services.inference.adapters import vllm_receiver as ours

    nothing = contextlib.nullcontext()
    monkeypatch.setattr(ours.current_platform, "is_cpu", lambda: True)
    monkeypatch.setattr(ours, "set_current_vllm_config", lambda config: nothing)
    monkeypatch.setattr(ours, "arrive", lambda manifest, source, staging, root: source)
    monkeypatch.setattr(ours.os, "setpriority", lambda *given: None)


class Tiny(torch.nn.Module):
    """Two layers that load as a vLLM model does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, False)
        for parameter in self.parameters():
            torch.nn.init.constant_(parameter, OLD)

    def load_weights(self, tensors: Any) -> set[str]:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        mine, loaded = dict(self.named_parameters()), set()
        for name, tensor in tensors:
            getattr(mine[name], "weight_loader", default_weight_loader)(mine[name], tensor)
            loaded.add(name)
        return loaded

    def values(self) -> list[float]:
        return [float(p.mean()) for p in self.parameters()]


def snapshot_of(version: int, value: float) -> Snapshot:
    state = {name: torch.full((2, 2), value) for name in ("first.weight", "second.weight")}
    return Snapshot.take(state, version=version, parent=version - 1)


class DirectLlm:
    """AsyncLLM's verbs, answered by the receiver in this process."""

    errored = False

    def __init__(self, model: Tiny):
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

        from services.inference.adapters import vllm_receiver as ours

        record_metadata_for_reloading(model)
        self.receiver = ours.MusterTransferEngine.__new__(ours.MusterTransferEngine)
        self.receiver.model, self.label = model, "0"
        self.receiver.vllm_config = self.receiver.model_config = None
        self.receiver.staging = self.staging = Staging()
        self.worker = ours.MusterWorkerExtension()
        self.worker.weight_transfer_engine = self.receiver
        self.worker._weight_update_active = False
        self.engine_core = self
        self.asked, self.packed_at_start = list[str](), False

    def stage(self, version: int, value: float = NEW) -> Any:
        """As the receiver's thread does it when everything has arrived and was verified."""
        from services.inference.adapters.vllm_receiver import Receipt

        snapshot = snapshot_of(version, value)
        receipt = Receipt(snapshot.manifest)
        self.receiver._receive(receipt, snapshot.stream.clone(), "")
        assert receipt.phase == "staged", receipt.error
        self.receiver.receipt = receipt
        return receipt

    async def collective_rpc(self, name: str) -> list[Any]:
        self.asked.append(name)
        return [getattr(self.worker, name)()]

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None: ...

    async def resume_generation(self) -> None: ...

    async def start_weight_update(self) -> None:
        assert not self.worker._weight_update_active, "vLLM begins no second one"
        self.packed_at_start = self.receiver.receipt.shadow is not None
        self.receiver.start_weight_update()
        self.worker._weight_update_active = True

    async def update_weights(self, request: Any) -> None:
        self.receiver.update_weights(request.update_info)

    async def finish_weight_update(self, label: str) -> None:
        self.receiver.finish_weight_update()
        self.worker._weight_update_active, self.label = False, label

    async def shutdown_weight_transfer_engine(self) -> None:
        assert not self.worker._weight_update_active, "vLLM forgets none that has begun"
        self.receiver.shutdown()

    async def abort(self, names: list[str]) -> None: ...

    async def generate(self, prompt: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        row = [{token: SimpleNamespace(logprob=-1.0)} for token in prompt["prompt_token_ids"]]
        version = SimpleNamespace(version=self.label, start=0, end=1)
        piece = SimpleNamespace(weight_versions=[version])
        yield SimpleNamespace(prompt_logprobs=row, outputs=[piece])

    def shutdown(self, timeout: float) -> None: ...


class World:
    def __init__(
        self, config: InferenceConfig | None = None, running: list[str] | None = None
    ) -> None:
        from services.inference.adapters.vllm import VllmEngine

        self.model = Tiny()
        self.llm = DirectLlm(self.model)
        self.llm.receiver.running = running
        self.engine = VllmEngine("nowhere", config or InferenceConfig())
        self.engine._llm = self.llm
        self.replica = Replica("main", Bounds(requests_max=2, scores_max=1, tokens_max=100))
        self.replica.started(0)
        self.driver = ReplicaDriver(self.replica, self.engine, receive_timeout_s=30.0)


async def test_a_swap_that_fails_half_way_fences_until_a_whole_one() -> None:
    world = World()
    async with world.driver as driver:
        world.llm.stage(1)
        lost = world.model.second._parameters.pop("weight")  # the swap trips over it

        with pytest.raises(Unavailable, match="fenced"):
            await driver.commit("main", 1, 1)

        world.model.second._parameters["weight"] = lost
        assert world.model.values() == [NEW, OLD], "the weights are mixed"
        assert (world.replica.state, world.replica.version) == (State.FENCED, 0)
        request = Sampling("r", (1, 2, 3), SamplingParams(), 5)
        with pytest.raises(Unavailable, match="fenced"):
            await anext(driver.generate(EpisodeKey("main", "g", 0, 0, 1), request))

        await driver.abort_update("main", 1, 1, fence=True)
        world.llm.stage(1)
        await driver.commit("main", 1, 1)
        assert world.model.values() == [NEW, NEW]
        assert (world.replica.state, world.replica.version) == (State.SERVING, 1)


class Picky(Tiny):
    """Checks shapes as vLLM's loaders do."""

    def load_weights(self, tensors: Any) -> set[str]:
        raise AssertionError("Attempted to load weight (3, 3) into parameter (2, 2)")


def test_a_loader_that_asserts_fails_the_update_at_once() -> None:
    from services.inference.adapters.vllm_receiver import Receipt

    snapshot = snapshot_of(1, NEW)
    receipt = Receipt(snapshot.manifest)
    DirectLlm(Picky()).receiver._receive(receipt, snapshot.stream, "")
    assert receipt.phase == "failed"
    assert receipt.error.startswith("AssertionError: Attempted to load weight (3, 3)")


async def test_an_engine_at_rest_takes_a_version_in_the_memory_of_the_old_one() -> None:
    world = World(running=[])
    async with world.driver as driver:
        receipt = world.llm.stage(1)
        assert (receipt.shadow, world.model.values()) == (None, [OLD, OLD])
        arrived = receipt.stream.data_ptr()
        before = [p.data_ptr() for p in world.model.parameters()]

        await driver.commit("main", 1, 1)

        assert world.model.values() == [NEW, NEW]
        assert [p.data_ptr() for p in world.model.parameters()] == before
        assert "muster_pack" not in world.llm.asked
        assert world.llm.staging.take(1).data_ptr() == arrived, "received there next time"


async def test_an_engine_takes_versions_at_rest_and_at_work_in_turns() -> None:
    """What one way leaves of vLLM's records of a layer is what the next one starts from."""
    world = World()
    async with world.driver as driver:
        for version, running in enumerate(([], ["one"], [], [], ["one"], ["one"], []), 1):
            world.llm.receiver.running = running
            receipt = world.llm.stage(version, 10.0 * version)
            assert receipt.status()["packed"] == bool(running)
            await driver.commit("main", 1, version)
            assert world.model.values() == [10.0 * version] * 2


async def test_an_engine_that_works_has_its_weights_packed_beside_the_old_ones() -> None:
    receipt = World(running=["one"]).llm.stage(1)
    assert receipt.status()["packed"]
    assert receipt.stream is None, "what arrived is copied, so the next version may arrive there"


async def test_weights_that_came_at_rest_are_packed_first_when_a_request_came_since() -> None:
    world = World(running=[])
    async with world.driver as driver:
        world.llm.stage(1)
        with world.engine._load.request("came-since"):
            await driver.commit("main", 1, 1)
        assert world.llm.packed_at_start
        assert world.model.values() == [NEW, NEW]


def staged_for_a_picky_model(monkeypatch: pytest.MonkeyPatch) -> World:
    """A version came at rest; its tensors will be refused."""
    world = World(running=[])
    world.llm.stage(1)
    monkeypatch.setattr(Tiny, "load_weights", Picky.load_weights)
    return world


async def test_weights_that_cannot_be_packed_leave_what_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = staged_for_a_picky_model(monkeypatch)
    async with world.driver as driver:
        with (
            world.engine._load.request("came-since"),
            pytest.raises(Refused, match=r"not staged \(failed"),
        ):
            await driver.commit("main", 1, 1)
        assert world.model.values() == [OLD, OLD]
        assert (world.replica.state, world.replica.version) == (State.SERVING, 0)


async def test_an_engine_that_stopped_half_way_through_loading_again_is_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = staged_for_a_picky_model(monkeypatch)
    async with world.driver as driver:
        with pytest.raises(Unavailable, match="fenced"):
            await driver.commit("main", 1, 1)
        assert world.replica.state is State.FENCED
        assert not world.engine.alive(), "its layers are gone: only a restart helps"


async def test_a_tensor_that_reaches_nothing_is_no_update_at_rest_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load_weights = Tiny.load_weights
    world = World(running=[])
    monkeypatch.setattr(Tiny, "load_weights", lambda self, ts: load_weights(self, list(ts)[:1]))
    async with world.driver as driver:
        world.llm.stage(1)
        with pytest.raises(Unavailable, match="fenced"):
            await driver.commit("main", 1, 1)
        assert not world.engine.alive()


async def test_an_apply_that_failed_before_the_model_was_touched_costs_no_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refused(*given: object, **named: object) -> None:
        raise RuntimeError("the caches cannot be reset")

    world = World(running=[])
    async with world.driver as driver:
        arrived = world.llm.stage(1).stream.data_ptr()
        with monkeypatch.context() as patched:
            patched.setattr(world.llm, "pause_scheduler_async", refused)
            with pytest.raises(Unavailable, match="fenced"):
                await driver.commit("main", 1, 1)
        assert world.engine.alive()
        assert world.model.values() == [OLD, OLD]
        assert world.llm.staging.take(1).data_ptr() == arrived
        world.llm.stage(1)
        await driver.commit("main", 1, 1)
        assert world.model.values() == [NEW, NEW]
        assert world.replica.state is State.SERVING


async def test_a_version_that_is_dropped_while_it_is_packed_ends_before_another_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from services.inference.adapters import vllm_receiver as ours
    from services.inference.adapters import vllm_shadow

    going, ended = threading.Event(), threading.Event()
    shadow_of = vllm_shadow.Shadow

    def slow(*given: Any) -> Any:
        going.set()
        assert ended.wait(20)
        return shadow_of(*given)

    world = World(running=["one"])
    async with world.driver as driver:
        with monkeypatch.context() as patched:
            patched.setattr(ours, "Shadow", slow)
            snapshot = snapshot_of(1, NEW)
            given = (ours.Receipt(snapshot.manifest), snapshot.stream.clone(), "")
            dropped = threading.Thread(target=world.llm.receiver._receive, args=given)
            dropped.start()
            await asyncio.to_thread(going.wait, 20)
        world.llm.receiver.running = []
        receipt = world.llm.stage(2)
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            tasks.create_task(driver.commit("main", 1, 2))
            while "muster_pack" not in world.llm.asked:  # noqa: ASYNC110 - until it is packed
                await asyncio.sleep(0.001)
            assert world.model.values() == [OLD, OLD]
            ended.set()
        await asyncio.to_thread(dropped.join, 20)
        assert receipt.shadow is not None
        assert world.model.values() == [NEW, NEW]


async def test_a_swap_that_succeeds_puts_everything_in_place() -> None:
    world = World()
    async with world.driver as driver:
        world.llm.stage(1)
        assert world.model.values() == [OLD, OLD], "staging leaves the served weights alone"

        figures = await driver.commit("main", 1, 1)

        assert figures.version == 1
        assert world.model.values() == [NEW, NEW]


async def test_an_apply_that_does_not_end_makes_the_engine_dead() -> None:
    class Stuck(DirectLlm):
        async def update_weights(self, request: Any) -> None:
            raise TimeoutError

    world = World()
    world.engine._llm = stuck = Stuck(world.model)
    async with world.driver as driver:
        stuck.stage(1)
        assert world.engine.alive()

        with pytest.raises(Unavailable, match="fenced"):
            await driver.commit("main", 1, 1)

        assert not world.engine.alive()


@pytest.mark.parametrize("verb", ["collective_rpc", "shutdown_weight_transfer_engine"])
async def test_an_engine_that_answers_no_verb_is_dead_and_holds_nobody_up(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(*given: object) -> None:
        await asyncio.Event().wait()

    world = World(InferenceConfig(stall_s=0.01))
    monkeypatch.setattr(world.llm, verb, silent)
    async with world.driver as driver, asyncio.timeout(20.0):
        asked = (
            driver.commit("main", 1, 1)
            if verb == "collective_rpc"
            else driver.abort_update("main", 1, 1, fence=False)
        )
        with pytest.raises(Unavailable, match="no answer"):
            await asked

        assert not world.engine.alive()
