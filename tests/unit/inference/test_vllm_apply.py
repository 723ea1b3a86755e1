"""An apply that fails half way, with the real receiver and shadow on a tiny model.

vLLM's code is imported but no engine runs: a stand-in for AsyncLLM hands its verbs straight to the
receiver. So what is tested is our half: the receiver, the shadow, the adapter, the fence; that
vLLM carries an exception of its worker to the caller is not.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from muster.errors import Unavailable
from muster.transfer import manifest as weights
from muster.types import EpisodeKey, SamplingParams
from services.inference.config import InferenceConfig
from services.inference.driver import ReplicaDriver
from services.inference.engine import Sampling
from services.inference.replica import Bounds, Replica, State

pytest.importorskip("vllm")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM and torch warn at import
Tensors = dict[str, torch.Tensor]
OLD, NEW = 1.0, 2.0


class Tiny(torch.nn.Module):
    """Two layers that load as a vLLM model does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, False)
        for parameter in self.parameters():
            torch.nn.init.constant_(parameter, OLD)

    def load_weights(self, tensors: Any) -> set[str]:
        mine, loaded = dict(self.named_parameters()), set()
        for name, tensor in tensors:
            mine[name].data.copy_(tensor)
            loaded.add(name)
        return loaded

    def values(self) -> list[float]:
        return [float(p.mean()) for p in self.parameters()]


class DirectLlm:
    """AsyncLLM's verbs, answered by the receiver in this process."""

    errored = False

    def __init__(self, model: Tiny):
        from services.inference.adapters.vllm_receiver import MusterTransferEngine

        self.receiver = MusterTransferEngine.__new__(MusterTransferEngine)
        self.receiver.model, self.label = model, "0"

    def stage(self, version: int) -> None:
        """As the receiver's thread leaves it when everything has arrived and was verified."""
        from services.inference.adapters.vllm_receiver import Receipt
        from services.inference.adapters.vllm_shadow import Shadow

        model = self.receiver.model
        state = {name: torch.full_like(p, NEW) for name, p in model.named_parameters()}
        receipt = Receipt(weights.build(state, version=version, parent=version - 1))
        receipt.shadow, receipt.phase = Shadow(model, state), "staged"
        self.receiver.receipt = receipt

    async def collective_rpc(self, name: str) -> list[Any]:
        assert name == "muster_update_status"
        return [self.receiver.receipt.status() if self.receiver.receipt else None]

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None: ...

    async def resume_generation(self) -> None: ...

    async def start_weight_update(self) -> None:
        self.receiver.start_weight_update()

    async def update_weights(self, request: Any) -> None:
        self.receiver.update_weights(request.update_info)

    async def finish_weight_update(self, label: str) -> None:
        self.receiver.finish_weight_update()
        self.label = label

    async def shutdown_weight_transfer_engine(self) -> None:
        self.receiver.shutdown()

    async def abort(self, names: list[str]) -> None: ...

    async def generate(self, prompt: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        row = [{token: SimpleNamespace(logprob=-1.0)} for token in prompt["prompt_token_ids"]]
        version = SimpleNamespace(version=self.label, start=0, end=1)
        piece = SimpleNamespace(weight_versions=[version])
        yield SimpleNamespace(prompt_logprobs=row, outputs=[piece])

    def shutdown(self, timeout: float) -> None: ...


class World:
    def __init__(self, config: InferenceConfig | None = None) -> None:
        from services.inference.adapters.vllm import VllmEngine

        self.model = Tiny()
        self.llm = DirectLlm(self.model)
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


def test_a_loader_that_asserts_fails_the_update_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from services.inference.adapters import vllm_receiver

    monkeypatch.setattr(vllm_receiver.current_platform, "is_cpu", lambda: True)
    monkeypatch.setattr(
        vllm_receiver, "set_current_vllm_config", lambda config: contextlib.nullcontext()
    )
    monkeypatch.setattr(vllm_receiver, "arrive", lambda *given: None)
    monkeypatch.setattr(vllm_receiver.os, "setpriority", lambda *given: None)
    model = Picky()
    state = {name: torch.full_like(p, NEW) for name, p in model.named_parameters()}
    monkeypatch.setattr(vllm_receiver.weights, "unpack", lambda *given: state)
    receiver = DirectLlm(model).receiver
    receiver.vllm_config, receiver.staging = None, SimpleNamespace(give_back=lambda stream: None)
    receipt = vllm_receiver.Receipt(weights.build(state, version=1, parent=0))
    receiver._receive(receipt, None, "")
    assert receipt.phase == "failed"
    assert receipt.error.startswith("AssertionError: Attempted to load weight (3, 3)")


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
