"""A batch as any trainer can use it: token sequences with masks, log-probabilities and rewards.

Owns: `Sample`, `Batch`. Promise: only valid siblings are in it; what the mask marks are the tokens
that the policy sampled, all of them and no others, so prompts and observations get no gradient;
nothing is decoded or encoded anew. torch is imported by `tensors` alone.
Does not cover: the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from typing import Any

from muster.advantage import Estimator, assign_credit, reward_of
from muster.errors import InvalidInput
from muster.layout import Sequence, lay_out
from muster.leased import TrainBatch, Trajectory
from muster.types import Value

NO_VERSION = -1
"""Version of a token that no policy sampled."""


class Sample(Value, frozen=True):
    """One context of an episode: usually the whole episode, several where it began anew.

    Per token, all of one length: `token_ids`; `loss_mask`, 1 where the policy sampled it, else 0;
    `logprobs` of the policy that sampled it, at `temperature`, 0.0 elsewhere; `versions` of that
    policy, `NO_VERSION` elsewhere. `advantage` compares `reward` with the group's other siblings.
    `clean`: every sampled token saw context of its own version only; else `logprobs` tells nothing
    about the difference between engine and trainer. `allowed`: per sampled token, what top-p and
    top-k left to choose from; empty without them.
    """

    episode: str
    group: str
    task: str
    sibling: int
    outcome: str
    reward: float
    advantage: float
    temperature: float
    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    clean: bool = True
    allowed: tuple[tuple[int, ...], ...] = ()

    @property
    def sampled(self) -> int:
        """Tokens that count."""
        return sum(self.loss_mask)


class Batch(Value, frozen=True):
    """The groups of one step. `leased` has all that the bank sent, also of `excluded` siblings:
    failures of the infrastructure, which count nowhere."""

    leased: TrainBatch
    samples: tuple[Sample, ...]
    excluded: int

    @property
    def step(self) -> int:
        """Which step it is for."""
        return self.leased.step

    @property
    def groups(self) -> tuple[str, ...]:
        """Ids of its groups."""
        return self.leased.groups

    @property
    def tokens(self) -> int:
        """Sampled tokens in it."""
        return sum(sample.sampled for sample in self.samples)

    @property
    def temperature(self) -> float:
        """The one that all of it was sampled at. Raises InvalidInput when there are several."""
        found = {sample.temperature for sample in self.samples}
        if len(found) > 1:
            raise InvalidInput(
                "its jobs were sampled at several temperatures",
                field="temperature",
                value=sorted(found),
                way_out="divide the logits of each sample by its own (sample.temperature)",
            )
        return found.pop() if found else 1.0

    def tensors(self, *, pad_token_id: int = 0, device: Any = "cpu") -> dict[str, Any]:
        """All samples as one rectangle: see the module's `tensors`."""
        return tensors(self.samples, pad_token_id=pad_token_id, device=device)

    def minibatches(
        self, size: int, *, pad_token_id: int = 0, device: Any = "cpu"
    ) -> Iterator[dict[str, Any]]:
        """The samples as tensors, `size` at a time, those of like length together."""
        ordered = sorted(self.samples, key=lambda sample: len(sample.token_ids))
        for start in range(0, len(ordered), size):
            chosen = ordered[start : start + size]
            yield tensors(chosen, pad_token_id=pad_token_id, device=device)


def batch_of(leased: TrainBatch, estimator: Estimator = "grpo") -> Batch:
    """Raises InvalidInput for a batch that cannot be trained on truthfully."""
    credit = assign_credit(leased.trajectories, estimator)
    samples: list[Sample] = []
    for index, item in enumerate(leased.trajectories):
        advantage = credit.advantages.get((item.group, item.sibling))
        if advantage is not None:
            samples += [_sample(item, advantage, laid) for laid in lay_out(index, item)]
    return Batch(leased, tuple(samples), sum(group.excluded for group in credit.groups))


def tensors(samples: Many[Sample], *, pad_token_id: int = 0, device: Any = "cpu") -> dict[str, Any]:
    """Samples as torch tensors, padded on the right.

    [samples, longest] each: `input_ids`, `attention_mask`, `loss_mask` (int64), `logprobs`
    (float32), `versions` (int64). [samples] each: `rewards`, `advantages` (float32), `groups`
    (int64, counted from 0 in the order in which they come). Column t of `loss_mask` and `logprobs`
    is about token t itself: compare them with the logits of column t − 1.
    Raises InvalidInput for what was sampled with top-p or top-k: a softmax over the whole
    vocabulary would not be what it was sampled from.
    """
    import torch

    for sample in samples:
        if sample.allowed:
            raise InvalidInput(
                "sampled with top-p or top-k, so its log-probabilities are over what those left",
                field="sampling",
                value=sample.episode,
                way_out="use sample.allowed in a loss of your own, or sample with temperature only",
            )
    longest = max((len(sample.token_ids) for sample in samples), default=0)

    def rows(values: list[tuple[Any, ...]], padding: Any, dtype: Any) -> Any:
        padded = [[*row, *[padding] * (longest - len(row))] for row in values]
        return torch.tensor(padded, dtype=dtype, device=device).view(len(samples), longest)

    numbers = {group: n for n, group in enumerate(dict.fromkeys(s.group for s in samples))}

    def column(values: list[Any], dtype: Any) -> Any:
        return torch.tensor(values, dtype=dtype, device=device)

    return {
        "input_ids": rows([s.token_ids for s in samples], pad_token_id, torch.int64),
        "attention_mask": rows([(1,) * len(s.token_ids) for s in samples], 0, torch.int64),
        "loss_mask": rows([s.loss_mask for s in samples], 0, torch.int64),
        "logprobs": rows([s.logprobs for s in samples], 0.0, torch.float32),
        "versions": rows([s.versions for s in samples], NO_VERSION, torch.int64),
        "rewards": column([s.reward for s in samples], torch.float32),
        "advantages": column([s.advantage for s in samples], torch.float32),
        "groups": column([numbers[s.group] for s in samples], torch.int64),
    }


def _sample(item: Trajectory, advantage: float, laid: Sequence) -> Sample:
    size = len(laid.token_ids)
    mask, logprobs, versions = [0] * size, [0.0] * size, [NO_VERSION] * size
    told = zip(laid.sampled, laid.logprobs, laid.versions, strict=True)
    for at, logprob, version in told:
        mask[at], logprobs[at], versions[at] = 1, logprob, version
    return Sample(
        episode=item.id,
        group=item.group,
        task=item.task,
        sibling=item.sibling,
        outcome=item.label.outcome.value,
        reward=reward_of(item) or 0.0,
        advantage=advantage,
        temperature=laid.temperature,
        token_ids=laid.token_ids,
        loss_mask=tuple(mask),
        logprobs=tuple(logprobs),
        versions=tuple(versions),
        clean=all(laid.clean),
        allowed=laid.allowed,
    )
