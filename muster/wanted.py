"""What a job may ask for: how it samples, and its policy for siblings that are not whole.

Owns: the ranges. Promise: pure; client and router refuse the same values in the same words, so that
a mistake shows before a router is looked for. Does not cover: tasks (taskset.py), counts of groups.
"""

from __future__ import annotations

from muster.errors import InvalidInput
from muster.types import JobPolicy, SamplingParams


def check_sampling(sampling: SamplingParams) -> None:
    """Raise InvalidInput for what the trainer could not apply to its own probabilities."""
    if not 0.0 < sampling.temperature <= 2.0:
        raise InvalidInput(
            "not a sampling temperature",
            field="sampling.temperature",
            value=sampling.temperature,
            way_out="choose a value in (0, 2]; 1.0 samples the policy itself",
        )
    if sampling.top_p != 1.0 or sampling.top_k != 0:
        raise InvalidInput(
            "the trainer cannot apply this transform to its own probabilities",
            field="sampling.top_p" if sampling.top_p != 1.0 else "sampling.top_k",
            value=sampling.top_p if sampling.top_p != 1.0 else sampling.top_k,
            way_out="sample with top_p = 1 and top_k = 0, and use the temperature instead",
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
