"""The router machine's whole configuration; units in the names.

Owns: nothing but values. Promise: what is not here cannot change a decision, so a journal that
opens with these rules replays. Does not cover: where they come from (config.py).
"""

from __future__ import annotations

from typing import ClassVar

from muster.types import Limits, Value


class RouterRules(Value, frozen=True):
    """The machine's whole configuration; units in the names.

    `journal_format` grows when commands get other fields: older journals are refused then.
    """

    # 2: AcquireBox and Generate carry why, holds included; 3: OpenGroup carries its purpose
    journal_format: ClassVar[int] = 3

    run: str
    owner_epoch: int
    groups_per_batch: int = 4
    repairs_max: int = 2
    lag_max: int = 0
    episodes_max: int = 64
    evaluation_share: float = 0.25  # of launches and places, while training has work too
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
    # placement, admission (seats.py), health (health.py); the defaults are those without a grant
    placement: str = "sticky_least_loaded"
    admission: str = "none"
    rank: str = "largest_context"
    probes: bool = False  # a replica takes turns only after a probe, and only on a credit
    interleave_groups: int = 8
    reserve_tokens: int = 25_000  # most room that a young conversation is given (growth.py)
    launch_fill: float = 1.0  # of the credit, at launch
    hold_fill: float = 0.97  # of the credit, at a tool boundary
    migrate_prefill_s: float = 6.0  # most that a move may cost
    keepalive_tokens: int = 20_000  # from this context on, a dead cache is stepped behind live ones
    fair_hold_s: float = 3600.0  # held for longer: first in rank
    prefix_block_tokens: int = 128
    prefix_entries_max: int = 20_000  # per replica
    prefill_base_s: float = 0.066  # + per 1,000 uncached tokens x: linear * x + square * x²
    prefill_linear_s: float = 0.0570
    prefill_square_s: float = 0.0044
    decode_base_s: float = 0.0106  # of a step, + per running request, + per token of context
    decode_request_s: float = 0.00042
    decode_context_s: float = 1.42e-7
    credit_ttl_max_s: float = 60.0  # a credit counts no longer, whatever the replica says
    probe_timeout_s: float = 20.0
    probe_pause_s: float = 2.0  # after a failed probe, doubled up to …
    probe_pause_max_s: float = 60.0
    wedge_s: float = 30.0  # requests run and the engine has taken no step for so long
    slow_ratio: float = 4.0  # a replica so much slower than the median takes no new conversation
    limits: Limits = Limits()
