"""The trainer's step against a bare PyTorch loop on the same batch, padded.

    python -m bench.trainer [--quick] [--json PATH|-]

Both arms hold the same model in bfloat16 with float32 master weights and AdamW, see the same
sequences, and take turns (step, bare, step, bare, …) in one process with as many threads. The bare
loop pads the siblings of a group to their longest, one forward and backward per group, policy
gradient on the sampled tokens, clip of the norm, update: what one would write first. The trainer's
step does that and also the decoupled loss, the mismatch, effective sample sizes and the drift
measured after it. Tokens are those of the sequences, without padding, so a ratio of rates is one of
times. Two batches: `shared`, where the siblings of a group have one prompt, as in a run, so the
trainer passes over it once; and `apart`, where every sibling has a prompt of its own.

The model is MUSTER_TEST_MODEL or the bundled one (with --quick: a random Llama of 5 million
parameters). Does not cover: checkpoints, leases, publication, GPUs.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import _results
from muster.clock import monotonic
from muster.layout import Sequence
from muster.leased import BatchMember, FrozenBatch, TrainBatch, Trajectory
from muster.model import ensure_model
from muster.types import Outcome, OutcomeLabel, SamplingParams, Segment, SegmentKind, VersionSpan
from services.trainer.adapters.model_files import load_model
from services.trainer.adapters.torch_policy import TorchPolicy, TorchSettings
from services.trainer.lineage import NO_PARENT, Lineage
from services.trainer.plan import StepPlan, plan_step

SIBLINGS, PROMPT = 4, 192
LINE = Lineage({0: NO_PARENT}, 0)


def batch_of(groups: int, vocabulary: int, *, shared: bool, chance: random.Random) -> TrainBatch:
    """Episodes of one to four turns: sampled 12 to 48 tokens, observed 8 to 64."""

    def ids(count: int) -> tuple[int, ...]:
        return tuple(chance.randrange(3, vocabulary) for _ in range(count))

    items = []
    for group in range(groups):
        common = ids(PROMPT)
        for sibling in range(SIBLINGS):
            segments = [Segment(SegmentKind.PROMPT, common if shared else ids(PROMPT))]
            for turn in range(chance.randint(1, 4)):
                if turn:
                    segments.append(Segment(SegmentKind.OBSERVATION, ids(chance.randint(8, 64))))
                count = chance.randint(12, 48)
                span = VersionSpan(0, 0, count, 0)
                segments.append(Segment(SegmentKind.MODEL, ids(count), (-8.0,) * count, (span,)))
            label = OutcomeLabel(Outcome.MODEL_SUCCESS, "verdict", reward=float(sibling == 0))
            items.append(
                Trajectory(
                    f"g{group}", "task", sibling, 0, label, tuple(segments), SamplingParams()
                )
            )
    members = tuple(BatchMember(f"g{group}", (0,) * SIBLINGS) for group in range(groups))
    return TrainBatch(FrozenBatch(1, members), tuple(items))


class BareLoop:
    """One optimizer step over padded groups."""

    def __init__(self, folder: Path):
        self._model = load_model(folder, torch.bfloat16).eval()
        self._params = list(self._model.parameters())
        self._masters = [
            torch.nn.Parameter(p.detach().to(torch.float32, copy=True)) for p in self._params
        ]
        self._adam = torch.optim.AdamW(self._masters, lr=2e-6, betas=(0.9, 0.95), fused=True)

    def step(self, plan: StepPlan) -> None:
        """Forward, backward and update over the whole plan."""
        for at in range(0, len(plan.sequences), SIBLINGS):
            chosen = slice(at, at + SIBLINGS)
            self._backward(plan.sequences[chosen], plan.advantages[chosen], plan.tokens)
        for master, parameter in zip(self._masters, self._params, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self._masters, 1.0)
        self._adam.step()
        self._adam.zero_grad()
        with torch.no_grad():
            for master, parameter in zip(self._masters, self._params, strict=True):
                parameter.copy_(master)

    def _backward(
        self, sequences: tuple[Sequence, ...], advantages: tuple[float, ...], total: int
    ) -> None:
        length = max(len(s.token_ids) for s in sequences)
        ids = torch.zeros(len(sequences), length, dtype=torch.long)
        real, credit = torch.zeros_like(ids), torch.zeros(len(sequences), length)
        for row, (sequence, advantage) in enumerate(zip(sequences, advantages, strict=True)):
            ids[row, : len(sequence.token_ids)] = torch.tensor(sequence.token_ids)
            real[row, : len(sequence.token_ids)] = 1
            credit[row, list(sequence.sampled)] = advantage
        logits = self._model(input_ids=ids, attention_mask=real, use_cache=False).logits[:, :-1]
        scores = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
        )
        ((scores * credit[:, 1:].flatten()).sum() / total).backward()


def random_model(folder: Path) -> Path:
    """A Llama of 5 million parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def seconds(work: Callable[[], Any]) -> float:
    """How long it took."""
    began = monotonic()
    work()
    return monotonic() - began


def measured(
    folder: Path, groups: int, rounds: int, threads: int
) -> dict[str, dict[str, list[float]]]:
    """Tokens per second by batch and arm, one value a round."""
    policy = TorchPolicy.load(folder, TorchSettings(threads=threads))
    bare = BareLoop(folder)
    vocabulary = int(policy._model.config.vocab_size)
    found: dict[str, dict[str, list[float]]] = {}
    for name in ("shared", "apart"):
        made = batch_of(groups, vocabulary, shared=name == "shared", chance=random.Random(7))
        plan = plan_step(made, LINE)
        tokens = sum(len(s.token_ids) for s in plan.sequences)
        arms: dict[str, Callable[[], Any]] = {
            "step": partial(policy.train, plan, lambda: False),
            "bare": partial(bare.step, plan),
        }
        for work in arms.values():  # not timed: memory is claimed, kernels are chosen
            work()
        found[name] = {arm: [] for arm in arms}
        for _ in range(rounds):
            for arm, work in arms.items():
                found[name][arm].append(tokens / seconds(work))
    return found


def main() -> None:
    """Measure, print, write."""
    asked = _results.arguments(__doc__ or "")
    machine, threads = _results.machine(), len(os.sched_getaffinity(0))
    groups, rounds = 2, 3 if asked.quick else 5
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as made:
        if asked.quick:
            folder, model = random_model(Path(made)), "random-5m"
        else:
            spec = os.environ.get("MUSTER_TEST_MODEL", "smollm2-135m-instruct")
            folder = ensure_model(spec, Path(".muster") / "cache")
            model = folder.name
        found = measured(folder, groups, rounds, threads)
    figures: dict[str, float] = {}
    ratios: dict[str, float] = {}
    for name, arms in found.items():
        for arm, values in arms.items():
            figures[f"{name}_{arm}_tokens_per_s_p50"] = statistics.median(values)
            figures[f"{name}_{arm}_tokens_per_s_min"] = min(values)
            figures[f"{name}_{arm}_tokens_per_s_max"] = max(values)
        pairs = [a / b for a, b in zip(arms["step"], arms["bare"], strict=True)]
        ratios[f"{name}_step_to_bare_p50"] = statistics.median(pairs)
        ratios[f"{name}_step_to_bare_min"] = min(pairs)
        ratios[f"{name}_step_to_bare_max"] = max(pairs)
    machine["load_1m_after"] = round(os.getloadavg()[0], 2)
    result = {
        "name": "trainer",
        "machine": machine,
        "settings": {
            "quick": asked.quick,
            "model": model,
            "threads": threads,
            "rounds": rounds,
            "groups": groups,
            "siblings": SIBLINGS,
            "prompt_tokens": PROMPT,
        },
        "figures": figures,
        "ratios": ratios,
    }
    _results.publish(result, asked.json)


if __name__ == "__main__":
    main()
