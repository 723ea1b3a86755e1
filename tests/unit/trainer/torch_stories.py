"""A model of a few thousand parameters, and steps for it."""

from __future__ import annotations

from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from muster.leased import TrainBatch, Trajectory
from services.trainer.adapters.torch_policy import TorchPolicy, TorchSettings
from services.trainer.lineage import NO_PARENT, Lineage
from services.trainer.plan import StepPlan, plan_step
from tests.unit.trainer.stories import batch, group, observed, prompt, sampled, trajectory

LINE = Lineage({0: NO_PARENT}, 0)
EXACT = TorchSettings(lr=1e-2, compute="float32", threads=1)
VOCABULARY = 32


def tiny_llama(folder: Path) -> Path:
    """A tiny Llama with tied embeddings, as a folder."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def going() -> bool:
    return False


def story(step: int = 1) -> TrainBatch:
    """Two groups with contrast, of several turns and lengths, and one without."""
    turns = [prompt(3, 4, 5), sampled(6, 7), observed(8, 9), sampled(10, step % 9)]
    first = [trajectory("a", 0, 1.0, turns), *group("a", 1.0, 0.0, 0.0)[1:]]
    return batch(*first, *group("b", 0.0, 1.0), *group("c", 1.0, 1.0), step=step)


def plan(*trajectories: Trajectory) -> StepPlan:
    return plan_step(batch(*trajectories) if trajectories else story(), LINE)


def reference(base: Path, step: StepPlan) -> list[Tensor]:
    """Log-probabilities of each sequence's sampled tokens, one plain forward pass per sequence."""
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    found = []
    for sequence in step.sequences:
        with torch.no_grad():
            logits = model(torch.tensor([sequence.token_ids])).logits[0] / sequence.temperature
        scores = logits.log_softmax(-1)
        found.append(
            torch.stack([scores[at - 1, sequence.token_ids[at]] for at in sequence.sampled])
        )
    return found


def with_logprobs(step: StepPlan, logprobs: list[Tensor]) -> StepPlan:
    """The same plan, as if the engine had recorded these."""
    sequences = tuple(
        replace(s, logprobs=tuple(found.tolist()))
        for s, found in zip(step.sequences, logprobs, strict=True)
    )
    return replace(step, sequences=sequences)


def weights(policy: TorchPolicy) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy.engine_state().items()}
