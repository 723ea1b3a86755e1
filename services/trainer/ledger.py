"""One entry per sampled token of a step.

Owns: what the engine recorded, what the trainer found, and the figures of both. Promise: a token is
one place in every tensor, in the order of the plan; only clean tokens (see layout.py) enter the
mismatch. Does not cover: formulas (divergence.py), the forward pass (adapters).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from services.trainer.divergence import mismatch, step_kl
from services.trainer.figures import Mismatch, MismatchBucket
from services.trainer.loss import LossSettings
from services.trainer.packing import MicroBatch
from services.trainer.plan import StepPlan

POSITION_EDGES = (0, 256, 1024, 4096, 16384, 65536, 2**31 - 1)
"""Bounds of the position buckets, tokens."""
LAG_MAX = 16
"""The bucket of tokens that were sampled so many versions ago or earlier."""


class StepLedger:
    """float32 entries [sampled tokens]; NaN where nothing was measured."""

    def __init__(self, plan: StepPlan, loss: LossSettings):
        sequences = plan.sequences
        sizes = [len(sequence.sampled) for sequence in sequences]
        counts = torch.tensor(sizes, dtype=torch.long)
        self._loss, self._starts = loss, [0, *itertools.accumulate(sizes)]
        self.behaviour = torch.tensor([v for s in sequences for v in s.logprobs])
        self.proximal = torch.full((self._starts[-1],), torch.nan)
        self.after = torch.full((self._starts[-1],), torch.nan)
        self.advantages = torch.tensor(plan.advantages).repeat_interleave(counts)
        heat = torch.tensor([sequence.temperature for sequence in sequences])
        self.temperatures = heat.repeat_interleave(counts)
        contrast = torch.zeros(len(sizes), dtype=torch.bool)
        contrast[list(plan.with_contrast)] = True
        self.trained = contrast.repeat_interleave(counts)
        self.clean = torch.tensor([v for s in sequences for v in s.clean], dtype=torch.bool)
        lags = [min(plan.lags.get(v, 0), LAG_MAX) for s in sequences for v in s.versions]
        self.lags = torch.tensor(lags, dtype=torch.long)
        places = [at for s in sequences for at in s.sampled]
        self.positions = torch.tensor(places, dtype=torch.long)
        turns = [place << 32 | turn for place, s in enumerate(sequences) for turn in s.turns]
        self.turns = torch.tensor(turns, dtype=torch.long)

    def places(self, row: MicroBatch) -> Tensor:
        """Index of each pick's token."""
        return torch.tensor([self._starts[p.sequence] + p.offset for p in row.picks])

    def mismatch(self, sequences: Iterable[int]) -> Mismatch:
        """Engine against trainer over the clean tokens of these sequences."""
        chosen = torch.zeros_like(self.clean)
        for index in sequences:
            chosen[self._starts[index] : self._starts[index + 1]] = True
        return self._compare(chosen)

    def per_trajectory(self, plan: StepPlan) -> dict[str, Mismatch]:
        """Engine against trainer, by trajectory id."""
        by_id: dict[str, list[int]] = {}
        for index, sequence in enumerate(plan.sequences):
            by_id.setdefault(plan.ids[sequence.trajectory], []).append(index)
        return {id_: self.mismatch(chosen) for id_, chosen in by_id.items()}

    def on_policy(self) -> Mismatch:
        """Engine against trainer where both had the same weights: nothing but numerics."""
        return self._compare(self.lags == 0)

    def buckets(self) -> tuple[MismatchBucket, ...]:
        """Engine against trainer by lag and position, only buckets with tokens."""
        edges = torch.tensor(POSITION_EDGES[1:-1])
        stretch = torch.bucketize(self.positions, edges, right=True)
        keys = self.lags * len(POSITION_EDGES) + stretch
        found = []
        for key in keys[self.clean].unique().tolist():
            lag, at = divmod(key, len(POSITION_EDGES))
            bounds = POSITION_EDGES[at], POSITION_EDGES[at + 1]
            found.append(MismatchBucket(lag, *bounds, self._compare(keys == key)))
        return tuple(found)

    def step_kl(self) -> float:
        """Drift of the step over the tokens measured after it."""
        done = ~self.after.isnan()
        before, after = self.proximal[done], self.after[done]
        return step_kl(before, after, self.behaviour[done], tis_cap=self._loss.tis_cap)

    def _compare(self, chosen: Tensor) -> Mismatch:
        chosen = chosen & self.clean
        return mismatch(
            self.behaviour[chosen],
            self.proximal[chosen],
            bounds=self._loss.bounds,
            turns=self.turns[chosen],
        )
