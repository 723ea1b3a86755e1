"""One GGUF file of the Llama family becomes a Hugging Face folder.

Owns: the conversion of names, shapes and tokenizer. Promise: the same file gives the same folder;
weights are dequantised in float32 and rounded once to bfloat16. Does not cover: other
architectures, sliced files, tokenizers other than byte-level BPE of the SmolLM kind (refused).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from muster.errors import InvalidInput

# GGUF name of a layer's tensor → Hugging Face name of its module.
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CONTROL = 3  # token type of GGUF for special tokens


def convert(gguf_file: Path, folder: Path) -> None:
    """Write config, generation config, tokenizer and bfloat16 safetensors into a new `folder`.

    Needs the packages gguf, torch, safetensors and tokenizers; accelerate and transformers are
    not used. Raises InvalidInput for a file of another kind.
    """
    from gguf import GGUFReader

    reader = GGUFReader(str(gguf_file))
    meta: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    kind = (meta.get("general.architecture"), meta.get("tokenizer.ggml.pre"))
    if kind != ("llama", "smollm"):
        raise InvalidInput(
            "only Llama models with the SmolLM tokenizer can be converted",
            field="gguf",
            value=kind,
            way_out="convert it with other means and set model.path to the folder",
        )
    folder.mkdir()
    names = _write_weights(reader, meta, folder)
    _write_json(folder / "config.json", _config(meta, tied="lm_head.weight" not in names))
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    _write_json(folder / "generation_config.json", {**_ids(meta, ends), "_from_model_config": True})
    _write_tokenizer(meta, folder)


def _ids(meta: dict[str, Any], defaults: dict[str, int]) -> dict[str, int]:
    keys = {
        "bos_token_id": "tokenizer.ggml.bos_token_id",
        "eos_token_id": "tokenizer.ggml.eos_token_id",
        "pad_token_id": "tokenizer.ggml.padding_token_id",
    }
    return {name: int(meta.get(keys[name], value)) for name, value in defaults.items()}


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`; KeyError if unknown."""
    head, _, suffix = name.rpartition(".")
    if not head.startswith("blk."):
        return f"{_TOP[head]}.{suffix}"
    _, layer, module = head.split(".", 2)
    return f"model.layers.{layer}.{_LAYER[module]}.{suffix}"


def _write_weights(reader: Any, meta: dict[str, Any], folder: Path) -> set[str]:
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    heads = {
        "attn_q": int(meta["llama.attention.head_count"]),
        "attn_k": int(meta["llama.attention.head_count_kv"]),
    }
    tensors: dict[str, Any] = {}
    for tensor in reader.tensors:
        weights = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        module = tensor.name.split(".")[-2]
        if module in heads:  # GGUF interleaves the rotary halves of each head; undo it
            rows, columns = weights.shape
            n = heads[module]
            halves = weights.reshape(n, rows // n // 2, 2, columns).swapaxes(1, 2)
            weights = halves.reshape(rows, columns)
        tensors[hf_name(tensor.name)] = weights.to(torch.bfloat16).contiguous()
    path = folder / "model.safetensors"
    save_file(tensors, str(path), metadata={"format": "pt"})
    path.chmod(0o644)  # the writer's own mode is 0600
    return set(tensors)


def _config(meta: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    width, heads = int(meta["llama.embedding_length"]), int(meta["llama.attention.head_count"])
    theta = float(meta["llama.rope.freq_base"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": int(meta["llama.vocab_size"]),
        "hidden_size": width,
        "intermediate_size": int(meta["llama.feed_forward_length"]),
        "num_hidden_layers": int(meta["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(meta["llama.attention.head_count_kv"]),
        "head_dim": width // heads,
        "hidden_act": "silu",
        "max_position_embeddings": int(meta["llama.context_length"]),
        "rms_norm_eps": round(float(meta["llama.attention.layer_norm_rms_epsilon"]), 10),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": tied,
        "use_cache": True,
        **_ids(meta, {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}),
    }


def _write_tokenizer(meta: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in special]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = _ids(meta, {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})
    settings: dict[str, Any] = {name.removesuffix("_id"): tokens[i] for name, i in ids.items()}
    settings |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(meta["llama.context_length"]),
        "clean_up_tokenization_spaces": False,
        "chat_template": meta["tokenizer.chat_template"],
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
