"""The trainer's log-probabilities of what an engine sampled, for comparing the two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from muster.layout import Sequence, lay_out
from muster.leased import Trajectory
from muster.types import Outcome, OutcomeLabel, SamplingParams, Segment
from services.trainer.adapters.model_files import load_model
from services.trainer.adapters.torch_forward import Scorer
from services.trainer.adapters.torch_head import HeadSettings
from services.trainer.packing import pack


def laid_out(segments: tuple[Segment, ...], params: SamplingParams) -> Sequence:
    """One episode as the trainer sees it."""
    label = OutcomeLabel(Outcome.MODEL_SUCCESS, "test", 1.0)
    (found,) = lay_out(0, Trajectory("g", "t", 0, 0, label, segments, params))
    return found


class Trainer:
    """A model folder in bfloat16 with a float32 head, as `trainer.head_dtype` has it."""

    def __init__(self, folder: Path):
        self._model = load_model(folder, torch.bfloat16).eval()
        self._scorer = Scorer(self._model, HeadSettings())

    def logprobs(self, item: Sequence) -> list[float]:
        """Of its sampled tokens, in order."""
        found: list[float] = []
        with torch.no_grad():
            for row in pack([item], tokens_max=4096):
                heat = torch.full((len(row.picks),), item.temperature)
                found += self._scorer.logprobs(row, heat).tolist()
        return found

    def routes(self, item: Sequence) -> torch.Tensor:
        """The experts that it chooses by itself, [tokens, layers, per_token]."""
        seen: list[torch.Tensor] = []
        hooks = [
            module.register_forward_hook(lambda _, __, answer: seen.append(answer[2]))
            for module in self._model.modules()
            if type(module).__name__.endswith("TopKRouter")
        ]
        self._scorer._replay.follow(None)
        with torch.no_grad():
            self._model(torch.tensor([item.token_ids]))
        for hook in hooks:
            hook.remove()
        return torch.stack(seen, 1)


def mean_difference(one: Any, other: Any) -> float:
    """Mean |Δ| per token."""
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)
