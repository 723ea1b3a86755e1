"""The one line that names what the batches waited for, and the setting that would move it.

Owns: part → setting, and the choice. Promise: pure; every part of the split has a setting that
exists. Does not cover: the split itself (split.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from muster.figures import BatchReport, Bottleneck
from muster.split import PARTS

TRAINER, PUBLICATION = "trainer", "publication"
SETTINGS: dict[str, tuple[str, str]] = {
    "queue": ("router.lag_max", "raise it: groups are then launched while the trainer works"),
    "prefill": ("inference.kv_cache_gib", "raise it: prefixes then stay cached between turns"),
    "decode": ("router.turn_tokens_max", "lower it, or start another inference replica"),
    "box_start": ("sandbox.starting_max", "raise it, or start another sandbox host"),
    "tool": ("router.step_timeout_s", "lower it, or start another sandbox host"),
    "verify": ("sandbox.verifying_max", "raise it, or make the tasks' tests faster"),
    "hold": ("inference.max_requests", "raise it, or start another inference replica"),
    "transfer": ("redis.url", "name a nearer or faster server"),
    TRAINER: ("trainer.micro_batch_tokens", "raise it while memory allows: batches wait for it"),
    PUBLICATION: ("trainer.transport", "nccl between GPUs; with gloo, fewer or nearer replicas"),
}
"""Part of the split → the setting of muster.toml that moves it, and which way."""


def bottleneck(batches: Sequence[BatchReport]) -> Bottleneck | None:
    """None before the first batch.

    While the trainer waits longer for batches than it works between them, the largest part of
    the split; else its step, or the way of its weights to the replicas.
    """
    if not batches:
        return None
    waited = math.fsum(b.time_to_trainable_batch_s for b in batches)
    worked = math.fsum(max(b.think_s or 0.0, 0.0) for b in batches)
    parts = {part: math.fsum(b.split[part] for b in batches) for part in PARTS}
    whole = waited
    if worked >= waited and worked > 0:
        # That of the last one is not part of any think-time here.
        published = min(math.fsum(map(_held_up, batches[:-1])), worked)
        parts = {PUBLICATION: published, TRAINER: worked - published}
        whole = waited + worked
    part = max(parts, key=lambda p: parts[p])
    return Bottleneck(part, parts[part] / whole if whole else 0.0, *SETTINGS[part])


def _held_up(batch: BatchReport) -> float:
    """Seconds of the publication in which the trainer did not train beside it."""
    if batch.trained is None:
        return 0.0
    latency = max((p.latency_s for p in batch.trained.publications), default=0.0)
    return max(0.0, latency - batch.trained.times.trained_meanwhile_s)
