"""What can be switched on in the real policy, and its comparison with the engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import LlamaForCausalLM

from muster.errors import Refused
from services.trainer.adapters.torch_policy import TorchPolicy
from tests.unit.trainer.stories import group, prompt, sampled, trajectory
from tests.unit.trainer.torch_stories import (
    EXACT,
    going,
    plan,
    reference,
    tiny_llama,
    weights,
    with_logprobs,
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_layers_computed_again_give_the_same_step(base: Path) -> None:
    policies = [
        TorchPolicy.load(base, replace(EXACT, activation_checkpointing=again))
        for again in (False, True)
    ]
    figures = [policy.train(plan(), going) for policy in policies]
    assert figures[0] == figures[1]
    for name, tensor in weights(policies[0]).items():
        assert torch.equal(tensor, policies[1].engine_state()[name]), name


def test_layers_computed_again_keep_less(base: Path) -> None:
    kept = []
    for again in (False, True):
        policy, total = TorchPolicy.load(base, replace(EXACT, activation_checkpointing=again)), 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.numel()
            return tensor

        row = policy._pack(plan(), range(len(plan().sequences)))[0]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            policy._scorer.logprobs(row, torch.ones(len(row.picks)))
        kept.append(total)
    assert kept[1] < kept[0] / 2


def test_frozen_weights_are_measured_and_do_not_move(base: Path) -> None:
    policy = TorchPolicy.load(base, replace(EXACT, frozen=True, epochs=2))
    before = weights(policy)
    figures = [policy.train(plan(), going) for _ in range(2)]
    assert all(torch.equal(before[name], now) for name, now in weights(policy).items())
    assert figures[0].grad_norm > 0
    assert figures[0].step_kl == 0.0
    assert figures[0] == figures[1]  # flat: the same tokens, the same mismatch


def test_the_first_step_compares_engine_and_trainer(base: Path) -> None:
    """Tokens recorded at another temperature than was told: the ratio of equals is not 1."""
    long = [trajectory("g", i, float(i), [prompt(), sampled(*range(3, 31))]) for i in range(3)]
    honest = with_logprobs(plan(*long), reference(base, plan(*long)))
    cold = [replace(s, temperature=0.2) for s in plan(*long).sequences]
    scaled = with_logprobs(
        plan(*long), reference(base, replace(plan(*long), sequences=tuple(cold)))
    )
    settings = replace(EXACT, on_policy_max=0.05)
    policy = TorchPolicy.load(base, settings)
    before = weights(policy)
    with pytest.raises(Refused, match="disagree on 84 tokens"):
        policy.train(scaled, going)
    assert all(torch.equal(before[name], now) for name, now in weights(policy).items())
    policy.train(honest, going)
    policy.train(scaled, going)  # asked once: later steps are for alarms


def test_masked_tokens_are_scored_as_they_were_sampled(base: Path) -> None:
    """Of two allowed ids: log-softmax over these alone, at the temperature."""
    item = trajectory("g", 0, 1.0, [prompt(), sampled(9, 10)])
    step = plan(item, *group("g", 1.0, 0.0)[1:])
    first = replace(step.sequences[0], allowed=((9, 4), (10, 11, 12)), temperature=0.7)
    step = replace(step, sequences=(first, *step.sequences[1:]))
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float64)
    logits = model(torch.tensor([first.token_ids])).logits[0] / 0.7
    wanted = torch.stack(
        [
            logits[at - 1, first.token_ids[at]] - logits[at - 1, list(ids)].logsumexp(0)
            for at, ids in zip(first.sampled, first.allowed, strict=True)
        ]
    )
    step = with_logprobs(step, [wanted, *reference(base, step)[1:]])
    policy = TorchPolicy.load(base, replace(EXACT, vocabulary_chunk=7))
    assert policy.train(step, going).mismatch.max_abs < 2e-5


def test_bypass_clips_against_the_engine(base: Path) -> None:
    """The engine said −3 where the trainer says otherwise: most ratios are beyond the clip."""
    loss = replace(EXACT.loss, correction="none", bypass=True)
    straight = TorchPolicy.load(base, EXACT).train(plan(), going)
    bypass = TorchPolicy.load(base, replace(EXACT, loss=loss)).train(plan(), going)
    assert straight.clipped_share == 0.0
    assert bypass.clipped_share > 0.0
