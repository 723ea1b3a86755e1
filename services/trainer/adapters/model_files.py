"""Files of a model under training, all safetensors.

Owns: names and layout inside a checkpoint folder. Promise: the folder loads as a model by itself
(weights, config, tokenizer); optimizer state lies in a folder of its own below it, as engines read
every safetensors file beside a config; nothing is a pickle.
Does not cover: when a folder counts as whole (checkpoint.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from muster.errors import ConfigError
from muster.tensor_files import as_os_error

SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer"
SHARD_BYTES = 256 << 20
"""Optimizer state is written in pieces of about this size, so that a stop is heard in between."""


def load_model(folder: Path, dtype: Any) -> Any:
    """A causal language model in `dtype`. Raises ConfigError naming the folder."""
    from transformers import AutoModelForCausalLM

    if not (folder / "config.json").is_file():
        raise ConfigError(
            "there is no Hugging Face model in this folder",
            field="model.path",
            value=folder,
            way_out="name a folder with config.json and safetensors weights",
        )
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True
    )


def recompute_layers(model: Any) -> None:
    """Keep only each layer's input for the backward pass, which computes the layer again.

    The layers alone are told that they train: dropout and router noise stay off, so the second
    pass equals the first. Raises ConfigError for a model whose layers cannot do it.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers or not model.supports_gradient_checkpointing:
        raise ConfigError(
            "the layers of this model cannot be computed again in the backward pass",
            field="trainer.activation_checkpointing",
            value=True,
            way_out="switch it off, and lower trainer.micro_batch_tokens if memory is short",
        )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers:
        layer.training = True


def side_names(folder: Path) -> tuple[str, ...]:
    """The config and tokenizer files that this model folder has."""
    return tuple(name for name in SIDE_FILES if (folder / name).is_file())


def read_side_files(folder: Path) -> dict[str, bytes]:
    """Config and tokenizer, read once: the folder may be a checkpoint that is pruned later."""
    return {name: (folder / name).read_bytes() for name in side_names(folder)}


def write_side_files(folder: Path, files: dict[str, bytes]) -> None:
    """So that the checkpoint is a model folder of its own."""
    for name, data in files.items():
        (folder / name).write_bytes(data)


def write_weights(folder: Path, tensors: dict[str, Any]) -> None:
    """The weights as an engine loads them. Raises OSError."""
    from safetensors.torch import save_file

    with as_os_error():
        save_file(tensors, str(folder / WEIGHTS), metadata={"format": "pt"})


def write_optimizer(folder: Path, tensors: dict[str, Any], between: Callable[[], None]) -> None:
    """optimizer/00000.safetensors …; calls `between` after each. Raises OSError."""
    (folder / OPTIMIZER).mkdir()
    shard: dict[str, Any] = {}
    size = number = 0
    for name, tensor in tensors.items():
        shard[name] = tensor
        size += tensor.numel() * tensor.element_size()
        if size >= SHARD_BYTES:
            _write_shard(folder, number, shard)
            shard, size, number = {}, 0, number + 1
            between()
    if shard:
        _write_shard(folder, number, shard)


def _write_shard(folder: Path, number: int, tensors: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    with as_os_error():
        save_file(tensors, str(folder / OPTIMIZER / f"{number:05d}.safetensors"))


def read_optimizer(folder: Path) -> dict[str, Any] | None:
    """All shards together; None when the folder is a plain model."""
    from safetensors.torch import load_file

    shards = sorted((folder / OPTIMIZER).glob("*.safetensors"))
    if not shards:
        return None
    return {name: tensor for shard in shards for name, tensor in load_file(str(shard)).items()}
