"""Versions that are not what they say, sent by a publisher that means no good.

Owns: the ways in which a version is wrong, and a tiny model to try them on. Promise: each is sent
with the publisher's own code under the trainer's epoch. Does not cover: what must follow.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from redis.asyncio import Redis

from muster.registry import Registry
from muster.transfer import manifest as weights
from muster.transfer.publisher import TransferSettings, publish
from muster.transfer.snapshot import Snapshot
from tests.faults.cycling_trainer import CHANGED, weights_at

if TYPE_CHECKING:
    from tests.faults.publication_world import World

DOCTORED = ("a tensor left out", "a tensor reshaped", "a byte turned", "a norm kept old")


def doctored(base: dict[str, Any], fault: str, *, version: int, parent: int) -> Snapshot:
    """The next place of the ring, wrong in one way."""
    state = weights_at(base, 1)
    victim = next(name for name in state if CHANGED in name)
    norm = next(name for name in state if "norm" in name)
    if fault == "a tensor left out":
        del state[victim]
    elif fault == "a tensor reshaped":
        state[victim] = state[victim].reshape(state[victim].shape[::-1]).contiguous()
    elif fault == "a norm kept old":
        state[norm] = state[norm] * 1.5
    snapshot = Snapshot.take(state, version=version, parent=parent)
    slots, _ = weights.layout(snapshot.manifest.tensors)
    names = [spec.name for spec in snapshot.manifest.tensors]
    if fault == "a byte turned":
        snapshot.stream[slots[names.index(victim)].start] ^= 1
    elif fault == "a norm kept old":
        slot = slots[names.index(norm)]
        snapshot.stream[slot.start : slot.end].copy_(weights.raw(base[norm]))
    return snapshot


async def publish_doctored(world: World, replica: str, fault: str) -> str:
    """Send it to one replica; its error, empty when it was taken."""
    from safetensors.torch import load_file

    base = load_file(world.model / "model.safetensors")
    newest = max((record.version for record in await world.records()), default=0)
    redis: Redis = world.redis
    entries = {e.id: e.address for e in await Registry(redis, "main").list("inference")}
    epoch = int(await redis.get("m:{main}:epoch:trainer") or 0)
    (report,) = await publish(
        doctored(base, fault, version=newest + 1000, parent=newest),
        run="main",
        trainer_epoch=epoch,
        replicas=[(replica, entries[replica])],
        settings=TransferSettings(timeout_s=60.0, call_timeout_s=10.0),
    )
    return report.error


def tiny_model(folder: Path) -> Path:
    """A model folder of some hundred kilobytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder
