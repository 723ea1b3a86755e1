"""What a job may ask for: how it samples, and its policy for siblings that are not whole.

Owns: the ranges. Promise: pure; client and router refuse the same values in the same words, so that
a mistake shows before a router is looked for. Does not cover: tasks (taskset.py), counts of groups.
"""

from __future__ import annotations

from muster.errors import InvalidInput
from muster.evaluated import GROUPS_KEPT
from muster.types import JobPolicy, Purpose, SamplingParams

TOP_K_MAX = 1024
"""Replicas take as much as their inference.mask_ids_max says; this is its default."""
_MASK_BYTES_MAX = 24 << 20  # of an episode: with its tokens it has to fit one message
_ID_BYTES = 4


def check_sizes(groups: int, group_size: int, purpose: Purpose = Purpose.TRAIN) -> None:
    """Raise InvalidInput for sizes that no router takes. An evaluation takes single samples."""
    _at_least("groups", groups, 1, "ask for one group or more")
    if purpose is Purpose.TRAIN:
        way_out = "use 2 or more: a group is scored by comparing its siblings"
        _at_least("group_size", group_size, 2, way_out)
        return
    _at_least("group_size", group_size, 1, "ask for one sample or more")
    if groups > GROUPS_KEPT:
        raise InvalidInput(
            "more groups than the results of which are kept",
            field="groups",
            value=groups,
            way_out=f"evaluate at most {GROUPS_KEPT} at a time",
        )


def _at_least(field: str, value: int, least: int, way_out: str) -> None:
    if value < least:
        raise InvalidInput(f"must be at least {least}", field=field, value=value, way_out=way_out)


def check_sampling(
    sampling: SamplingParams, tokens_max: int = 0, purpose: Purpose = Purpose.TRAIN
) -> None:
    """Raise InvalidInput for what the trainer could not apply to its own probabilities.

    With top-p or top-k it applies the masks that the engine returns, whose size top_k bounds.
    tokens_max: sampled tokens of an episode, where they are known. An evaluation is for no trainer:
    it may be greedy (top_k = 1).
    """
    if not 0.0 < sampling.temperature <= 2.0:
        raise InvalidInput(
            "not a sampling temperature",
            field="sampling.temperature",
            value=sampling.temperature,
            way_out="choose a value in (0, 2]; 1.0 samples the policy itself",
        )
    if not 0.0 < sampling.top_p <= 1.0:
        raise InvalidInput(
            "not a share of the probability",
            field="sampling.top_p",
            value=sampling.top_p,
            way_out="choose a value in (0, 1]; 1 turns it off",
        )
    if purpose is Purpose.EVALUATE and sampling.top_k == 1:
        return
    if sampling.top_k != 0 and not 2 <= sampling.top_k <= TOP_K_MAX:
        raise InvalidInput(
            "not a number of tokens to choose from",
            field="sampling.top_k",
            value=sampling.top_k,
            way_out=f"choose 2 to {TOP_K_MAX}, or 0 to turn it off",
        )
    if sampling.top_p < 1.0 and sampling.top_k == 0:
        raise InvalidInput(
            "what is left to choose from is recorded with each token, and only top_k bounds it",
            field="sampling.top_p",
            value=sampling.top_p,
            way_out=f"set top_k too (2 to {TOP_K_MAX}), or sample with top_p = 1 and use the "
            "temperature instead",
        )
    fits = _MASK_BYTES_MAX // (_ID_BYTES * tokens_max) if tokens_max else TOP_K_MAX
    if sampling.top_k > fits:
        raise InvalidInput(
            f"the masks of {tokens_max} tokens would not fit one message",
            field="sampling.top_k",
            value=sampling.top_k,
            way_out=f"choose at most {fits}, or lower router.episode_tokens_max",
        )


def check_policy(policy: JobPolicy, *, group_size: int) -> None:
    """Raise InvalidInput for a value that no router takes; `group_size` bounds valid_min."""
    checks: list[tuple[str, object, bool, str]] = [
        ("repairs_max", policy.repairs_max, 0 <= (policy.repairs_max or 0) <= 16, "0 to 16"),
        (
            "valid_min",
            policy.valid_min,
            policy.valid_min is None or 1 <= policy.valid_min <= group_size,
            f"1 to the group's size, {group_size}",
        ),
        (
            "zero_variance",
            policy.zero_variance,
            policy.zero_variance in (None, "train", "filter"),
            "train or filter",
        ),
        (
            "infra_ceiling",
            policy.infra_ceiling,
            policy.infra_ceiling is None or 0.0 < policy.infra_ceiling <= 1.0,
            "a share above 0, at most 1",
        ),
    ]
    for field, value, right, way_out in checks:
        if not right:
            raise InvalidInput(
                "not a value of this policy",
                field=f"policy.{field}",
                value=value,
                way_out=f"choose {way_out}, or leave it out to take the configured one",
            )
