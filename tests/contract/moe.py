"""A mixture-of-experts model of a few million parameters, of our own making.

Its weights are random, wide enough that the choice of experts matters, and the same every time.
"""

from __future__ import annotations

from pathlib import Path

import torch

LAYERS, EXPERTS, CHOSEN = 3, 8, 2


def write_moe(folder: Path, *, vocabulary: int = 49152) -> Path:
    """A model folder as engines and trainers load it, in bfloat16."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(11)
    config = MixtralConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_local_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        max_position_embeddings=2048,
        eos_token_id=2,
        bos_token_id=1,
        tie_word_embeddings=False,
    )
    model = MixtralForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=1.0 if "embed" in name else 0.25)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder
