"""The router machine's whole configuration; units in the names.

Owns: nothing but values. Promise: what is not here cannot change a decision, so a journal that
opens with these rules replays. Does not cover: where they come from (config.py).
"""

from __future__ import annotations

from muster.types import Limits, Value


class RouterRules(Value, frozen=True):
    """The machine's whole configuration; units in the names."""

    run: str
    owner_epoch: int
    groups_per_batch: int = 4
    repairs_max: int = 2
    lag_max: int = 0
    episodes_max: int = 64
    turns_max: int = 4
    turn_tokens_max: int = 64
    episode_tokens_max: int = 1024
    context_tokens_max: int = 2048
    command_bytes_max: int = 64 << 10
    box_steps_max: int = 512
    step_timeout_s: float = 10.0
    episode_timeout_s: float = 300.0
    generate_timeout_s: float = 60.0
    unparseable_max: int = 3
    generate_retries_max: int = 3
    box_retries_max: int = 20
    verify_retries_max: int = 1
    retry_after_s: float = 0.5  # doubled by each further failure of one turn …
    retry_max_s: float = 4.0  # … up to this
    hold_max_s: float = 300.0
    move_margin: int = 8
    move_ratio: float = 2.0
    infra_ceiling: float = 0.5  # share of a batch's worth of attempts
    infra_pause_s: float = 60.0
    resume_wait_s: float = 10.0  # for the host of a box that a former router left
    stall_s: float = 60.0
    limits: Limits = Limits()
