"""Recorded routing on mixture-of-experts models of a few thousand parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
)

from muster.errors import InvalidInput
from muster.layout import UNRECORDED, Sequence, lay_out
from muster.types import RoutedExperts, Segment
from services.trainer.adapters.torch_forward import Scorer
from services.trainer.adapters.torch_head import HeadSettings
from services.trainer.adapters.torch_policy import TorchPolicy, TorchSettings
from services.trainer.lineage import NO_PARENT, Lineage
from services.trainer.packing import pack
from services.trainer.plan import plan_step
from tests.unit.trainer.stories import batch, prompt, sampled, trajectory

LAYERS, EXPERTS, CHOSEN = 2, 4, 2
SHAPE = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}


def mixtral() -> MixtralForCausalLM:
    """Normalises over the chosen experts."""
    config = MixtralConfig(**SHAPE, num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN)
    return MixtralForCausalLM(config)


def olmoe() -> OlmoeForCausalLM:
    """Keeps the denominator over all experts."""
    config = OlmoeConfig(**SHAPE, num_experts=EXPERTS, num_experts_per_tok=CHOSEN, pad_token_id=0)
    return OlmoeForCausalLM(config)


@pytest.fixture(params=[mixtral, olmoe])
def model(request: pytest.FixtureRequest) -> Any:
    """In float64, with weights under which the choice of experts matters."""
    torch.manual_seed(3)
    made = request.param().double().eval()
    made.set_experts_implementation("eager")  # the grouped product knows no float64
    for name, parameter in made.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.4)
    return made


def routed(segment: Segment, seed: int) -> Segment:
    """The segment with any routing: two experts, not the same, per token and layer."""
    chance = torch.Generator().manual_seed(seed)
    rows = len(segment.token_ids) * LAYERS
    ids = torch.rand(rows, EXPERTS, generator=chance).argsort(1)[:, :CHOSEN]
    data = ids.to(torch.uint16).numpy().tobytes()
    return replace(segment, experts=RoutedExperts(LAYERS, CHOSEN, data))


def sequence(*segments: Segment, group: str = "g") -> Sequence:
    return lay_out(0, trajectory(group, 0, 1.0, segments))[0]


def chosen_by(item: Sequence) -> Tensor:
    """[tokens, layers, chosen]"""
    assert item.experts is not None
    ids = torch.frombuffer(bytearray(item.experts.ids), dtype=torch.uint16).long()
    return ids.reshape(-1, LAYERS, CHOSEN)


def scores(model: Any, *sequences: Sequence, budget: int = 1024) -> list[Tensor]:
    """What the trainer finds, per sequence."""
    scorer = Scorer(model, HeadSettings("float64", rows=4, columns=8))
    found: list[list[Tensor]] = [[] for _ in sequences]
    for row in pack(sequences, tokens_max=budget):
        values = scorer.logprobs(row, torch.ones(len(row.picks)))
        for pick, value in zip(row.picks, values, strict=True):
            found[pick.sequence].append(value)
    scorer._replay.follow(None)  # the model is its own again
    return [torch.stack(values) for values in found]


def by_hand(model: Any, item: Sequence, choice: Tensor | None) -> Tensor:
    """A plain pass in which each block is its formula, Σ_i g_i E_i(x); without a choice, its own.

    g_i = I_i e^{s_i} / Σ_j I_j e^{s_j}; over all j where the model does not normalise.
    """
    kept = [layer.mlp.forward for layer in model.model.layers]
    for number, layer in enumerate(model.model.layers):
        if choice is not None:
            layer.mlp.forward = _formula(layer.mlp, choice[:, number])
    try:
        logits = model(torch.tensor([item.token_ids])).logits[0]
    finally:
        for layer, forward in zip(model.model.layers, kept, strict=True):
            layer.mlp.forward = forward
    table = logits.log_softmax(-1)
    return torch.stack([table[at - 1, item.token_ids[at]] for at in item.sampled])


def _formula(block: Any, choice: Tensor) -> Any:
    normalises = getattr(block.gate, "norm_topk_prob", True)

    def forward(hidden: Tensor) -> Tensor:
        rows = []
        for token, state in enumerate(hidden[0]):
            powers = (block.gate.weight @ state).exp()
            picked = choice[token].tolist()
            total = powers[picked].sum() if normalises else powers.sum()
            rows.append(sum(powers[i] / total * _expert(block.experts, i, state) for i in picked))
        return torch.stack(rows)[None]

    return forward


def _expert(experts: Any, number: int, state: Tensor) -> Tensor:
    gate, up = (experts.gate_up_proj[number] @ state).chunk(2)
    result: Tensor = experts.down_proj[number] @ (torch.nn.functional.silu(gate) * up)
    return result


TURNS = (prompt(3, 4, 5), sampled(6, 7, 8))


def test_its_own_routing_replayed_is_the_plain_pass(model: Any) -> None:
    item = sequence(*TURNS)
    seen: list[Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, answer: seen.append(answer[2]))
        for layer in model.model.layers
    ]
    plain = by_hand(model, item, None)
    for hook in hooks:
        hook.remove()
    data = torch.stack(seen, 1).to(torch.uint16).numpy().tobytes()
    recorded = replace(item, experts=RoutedExperts(LAYERS, CHOSEN, data))
    assert torch.allclose(scores(model, recorded)[0], plain, atol=1e-6, rtol=0)
    assert torch.allclose(scores(model, item)[0], plain, atol=1e-6, rtol=0)


def test_another_routing_gives_what_the_formula_says(model: Any) -> None:
    item = sequence(*(routed(segment, i) for i, segment in enumerate(TURNS)))
    wanted = by_hand(model, item, chosen_by(item))
    assert torch.allclose(scores(model, item)[0], wanted, atol=1e-6, rtol=0)
    assert (wanted - by_hand(model, item, None)).abs().max() > 1e-3


def test_the_gradient_reaches_the_router_through_its_own_logits(model: Any) -> None:
    item = sequence(*(routed(segment, i) for i, segment in enumerate(TURNS)))
    gates = [layer.mlp.gate.weight for layer in model.model.layers]
    found = torch.autograd.grad(scores(model, item)[0].sum(), gates)
    wanted = torch.autograd.grad(by_hand(model, item, chosen_by(item)).sum(), gates)
    for mine, reference in zip(found, wanted, strict=True):
        assert reference.abs().max() > 1e-3
        assert torch.allclose(mine, reference, atol=1e-5, rtol=1e-4)


def test_tokens_without_a_record_are_routed_by_the_model(model: Any) -> None:
    """The prompt has none: its rows are those of the model's own choice, the others recorded."""
    item = sequence(TURNS[0], routed(TURNS[1], 1))
    assert item.experts is not None
    assert item.experts.ids[: 3 * LAYERS * CHOSEN * 2] == UNRECORDED * (3 * LAYERS * CHOSEN)
    own: list[Tensor] = []
    recorded = chosen_by(item)
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda _, given: own.append(given[1]))
    found = scores(model, item)[0]
    used = torch.stack(own, 1)
    assert torch.equal(used[3:], recorded[3:])
    assert torch.allclose(found, by_hand(model, item, used), atol=1e-6, rtol=0)


def test_packed_siblings_keep_their_own_routing(model: Any) -> None:
    """Two share prompt and routing, the third went elsewhere with the same prompt."""
    shared, other = routed(TURNS[0], 0), routed(TURNS[0], 9)
    items = [
        sequence(shared, routed(sampled(6, 7), 1)),
        sequence(shared, routed(sampled(9, 10, 11), 2)),
        sequence(other, routed(sampled(6, 7), 3)),
    ]
    rows = pack(items, tokens_max=1024)
    assert sum(len(row.token_ids) for row in rows) == (3 + 2 + 3) + (3 + 2)
    for item, found in zip(items, scores(model, *items), strict=True):
        assert torch.allclose(found, by_hand(model, item, chosen_by(item)), atol=1e-6, rtol=0)


def test_a_row_may_mix_sequences_with_and_without_a_record(model: Any) -> None:
    items = [
        sequence(*(routed(segment, 1) for segment in TURNS), group="a"),
        sequence(*TURNS, group="b"),
    ]
    found = scores(model, *items)
    assert torch.allclose(found[0], by_hand(model, items[0], chosen_by(items[0])), atol=1e-6)
    assert torch.allclose(found[1], by_hand(model, items[1], None), atol=1e-6)


def test_a_record_with_dense_layers_is_read_by_layer_number(model: Any) -> None:
    """An engine that tells a row for every layer, of which the last has no experts here."""
    item = sequence(*(routed(segment, i) for i, segment in enumerate(TURNS)))
    wide = torch.cat([chosen_by(item), torch.zeros(6, 1, CHOSEN, dtype=torch.long)], 1)
    data = wide.to(torch.uint16).numpy().tobytes()
    padded = replace(item, experts=RoutedExperts(LAYERS + 1, CHOSEN, data))
    assert torch.equal(scores(model, padded)[0], scores(model, item)[0])


@pytest.mark.parametrize(("layers", "per_token", "expert"), [(1, 2, 0), (2, 3, 0), (2, 2, EXPERTS)])
def test_a_record_of_another_model_is_refused(
    model: Any, layers: int, per_token: int, expert: int
) -> None:
    data = expert.to_bytes(2, "little") * (6 * layers * per_token)
    item = replace(sequence(*TURNS), experts=RoutedExperts(layers, per_token, data))
    with pytest.raises(InvalidInput, match="2 routers that choose 2 of 4"):
        scores(model, item)


def test_a_model_without_experts_refuses_a_record() -> None:
    dense = LlamaForCausalLM(LlamaConfig(**SHAPE)).double()
    with pytest.raises(InvalidInput, match="0 routers"):
        scores(dense, sequence(*(routed(segment, 0) for segment in TURNS)))


@pytest.fixture(params=[mixtral, olmoe])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(3)
    request.param().save_pretrained(tmp_path)
    return tmp_path


def test_layers_computed_again_follow_the_same_routing(folder: Path) -> None:
    items = [
        trajectory("g", i, float(i == 0), [routed(s, 5 * i + n) for n, s in enumerate(TURNS)])
        for i in range(3)
    ]
    plan = plan_step(batch(*items), Lineage({0: NO_PARENT}, 0))
    settings = TorchSettings(lr=1e-2, compute="float32", threads=1, micro_batch_tokens=8)
    figures = []
    for again in (False, True):
        policy = TorchPolicy.load(folder, replace(settings, activation_checkpointing=again))
        figures.append(policy.train(plan, lambda: False))
    assert figures[0] == figures[1]
    assert figures[0].grad_norm > 0


def test_an_engine_gets_every_expert_by_its_own_name(folder: Path) -> None:
    from safetensors.torch import load_file

    stored = load_file(folder / "model.safetensors")
    sent = TorchPolicy.load(folder, TorchSettings(compute="float32", threads=1)).engine_state()
    assert set(sent) == set(stored)
    assert all(torch.equal(sent[name], tensor) for name, tensor in stored.items())
