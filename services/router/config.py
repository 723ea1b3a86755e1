"""Section [router] of the configuration.

Owns: the values and their bounds. Promise: every limit of the router is here. Does not cover:
what the whole run shares (groups_per_batch, repairs_max: top level).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from muster.config import Config, Section
from muster.types import Limits
from services.router.rules import RouterRules

_RULES = RouterRules(run="", owner_epoch=0)  # for defaults


class RouterConfig(Section):
    """The front door and the agent loop."""

    listen: str = "127.0.0.1:7400"
    """Where clients connect; port 0 lets the system choose."""
    lag_max: int = Field(0, ge=0, le=64)
    """Batches of groups opened ahead of the policy that they will train; 0 is synchronous. With
    more, a slow group that others overtake may be trained some versions older than this; the report
    shows the lag as it was."""
    episodes_max: int = Field(64, ge=1, le=100_000)
    """Episodes running at once."""
    evaluation_share: float = Field(_RULES.evaluation_share, gt=0, lt=1)
    """Share of the launches that are an evaluation's while training has somebody to launch too, and
    of episodes_max that it may fill while a training job runs."""
    turns_max: int = Field(4, ge=1, le=10_000)
    """Turns of an episode where its task does not say."""
    turn_tokens_max: int = Field(64, ge=1)
    """Sampled tokens per turn."""
    episode_tokens_max: int = Field(1024, ge=1)
    """Sampled tokens per episode."""
    context_tokens_max: int = Field(2048, ge=16)
    """Tokens of context; reaching it ends the episode as the model's failure."""
    command_bytes_max: int = Field(64 << 10, ge=1, le=100 << 10)
    """Longest command; a longer one is a reply that cannot be read. At most the hosts'
    sandbox.command_bytes_max."""
    box_steps_max: int = Field(512, ge=1, le=65536)
    """Most turns of an episode, whatever its task says. At most the hosts' sandbox.steps_max."""
    step_timeout_s: float = Field(10.0, gt=0)
    """Time limit of one command."""
    episode_timeout_s: float = Field(300.0, gt=0)
    """Time in which the model acts (its tokens, its commands) in one episode; a task may ask for
    less. Waiting that Muster causes is not counted."""
    generate_timeout_s: float = Field(60.0, gt=0)
    """Deadline of one call to a replica."""
    unparseable_max: int = Field(3, ge=1)
    """Replies in a row without a command that end an episode."""
    generate_retries_max: int = Field(5, ge=0)
    """Calls that are repeated for one turn after a replica failed it."""
    box_retries_max: int = Field(60, ge=0)
    """Requests for a box that are repeated while hosts are full or away."""
    hold_max_s: float = Field(300.0, gt=0)
    """Longest wait of an episode for a replica that takes turns. A wait for room in its KV cache is
    none: see `fair_hold_s`."""
    box_start_timeout_s: float = Field(60.0, gt=0)
    """Deadline of one request for a box."""
    host_away_s: float = Field(20.0, ge=0, le=600)
    """How long a sandbox host may be away before its boxes count as lost: its service may come
    back with them. At most the hosts' sandbox.orphan_s."""
    verify_queue_s: float = Field(600.0, ge=0)
    """How long a verification may wait for one of its host's places before its own time runs."""
    infra_ceiling: float = Field(0.5, gt=0, le=1)
    """Share of infrastructure failures among a batch's worth of attempts above which a job is
    paused; a job may ask for its own."""
    infra_pause_s: float = Field(60.0, gt=0)
    """How long such a job launches nothing."""
    placement: Literal[
        "predicted_finish",
        "sticky_least_loaded",
        "least_loaded",
        "round_robin",
        "consistent_hash",
        "cache_aware",
        "overlap_cost",
    ] = "predicted_finish"
    """How the replica of a turn is chosen. Without `admission`, conversations have no seat."""
    admission: Literal["kv_fit", "hold_resume", "pressure", "none"] = "kv_fit"
    """Who may fill a replica's KV cache. kv_fit: only what fits its credit goes on at a tool
    boundary, the others are held, larger contexts first; hold_resume: hold above 95 %, resume the
    smallest below 80 %; pressure: only launches are held back; none: everybody goes on."""
    rank: Literal["largest_context", "smallest_context", "oldest_group", "arrival"] = (
        "largest_context"
    )
    """Who goes first under kv_fit."""
    interleave_groups: int = Field(8, ge=1, le=1024)
    """Groups whose siblings are launched in turn: all first ones, then all second ones …"""
    reserve_tokens: int = Field(25_000, ge=0)
    """Most room that a young conversation is given at launch; at most context_tokens_max. Once
    conversations end smaller than twice this, half of their mean context."""
    launch_fill: float = Field(_RULES.launch_fill, gt=0, le=2)
    """Share of a replica's KV credit that conversations may have been given room for, a new one
    included."""
    hold_fill: float = Field(0.97, gt=0, le=1)
    """Share of a replica's KV credit that conversations may fill."""
    credit_ttl_max_s: float = Field(_RULES.credit_ttl_max_s, ge=2, le=600)
    """Longest time for which a replica's KV credit counts, whatever the replica says."""
    migrate_prefill_s: float = Field(6.0, ge=0)
    """A held conversation moves to another replica when its prefill there costs no more, by the
    costs below."""
    keepalive_tokens: int = Field(_RULES.keepalive_tokens, ge=0)
    """When a conversation of at least so many tokens has ended, the caches of those whose tools run
    are touched, so that its dead one goes first; 0: never."""
    prefill_base_s: float = Field(_RULES.prefill_base_s, ge=0, le=60)
    """What an engine's work costs, to predict by; `muster sim fit` measures all six of a run and
    prints them for here. Prefill of one request: this …"""
    prefill_linear_s: float = Field(_RULES.prefill_linear_s, ge=0, le=60)
    """… and per 1,000 uncached tokens …"""
    prefill_square_s: float = Field(_RULES.prefill_square_s, ge=0, le=60)
    """… and per square of 1,000 uncached tokens."""
    decode_base_s: float = Field(_RULES.decode_base_s, ge=0, le=60)
    """One decode step: this …"""
    decode_request_s: float = Field(_RULES.decode_request_s, ge=0, le=60)
    """… and per request that runs …"""
    decode_context_s: float = Field(_RULES.decode_context_s, ge=0, le=60)
    """… and per token of their contexts."""
    fair_hold_s: float = Field(3600.0, gt=0)
    """A conversation that is held for longer is the first to go on."""
    prefix_block_tokens: int = Field(128, ge=16, le=4096)
    """Tokens per entry of the router's index of cached prefixes."""
    prefix_entries_max: int = Field(20_000, ge=100, le=10_000_000)
    """Entries of that index per replica; the least recently used is dropped."""
    probe_timeout_s: float = Field(20.0, gt=0)
    """Deadline of the short request that a replica must answer before it takes turns."""
    probe_pause_s: float = Field(_RULES.probe_pause_s, gt=0, le=600)
    """Pause after a failed one; doubled by each further failure …"""
    probe_pause_max_s: float = Field(_RULES.probe_pause_max_s, gt=0, le=3600)
    """… up to this."""
    wedge_s: float = Field(30.0, gt=0)
    """Requests run on a replica and its engine has taken no step for so long: its conversations
    move; so do those that are held by one that takes no turn. Above an engine's longest step; the
    time in which it applies weights does not count."""
    slow_ratio: float = Field(4.0, ge=1.5)
    """A replica so many times slower than the median takes no new conversation."""
    stall_s: float = Field(60.0, gt=0)
    """Nothing has moved for so long: the router says what it waits for."""
    redis_patience_s: float = Field(60.0, gt=0)
    """How long an append is repeated while Redis is away; then the router stops."""
    box_memory_bytes: int = Field(0, ge=0)
    """Memory of a box, its files included; 0: what its task asks for, else the host's usual."""
    box_pids: int = Field(64, ge=8)
    """Processes of a box."""
    box_disk_bytes: int = Field(0, ge=0)
    """Bytes that a box may write; 0: what its task asks for, else the host's usual."""
    box_disk_inodes: int = Field(4096, ge=64)
    """Files that a box may create."""
    box_cpus: float = Field(0.0, ge=0, le=1024)
    """Processors that a box may use at a time; 0: what its task asks for, else the host's usual."""
    box_output_bytes: int = Field(2048, ge=128)
    """Output kept per step, half head and half tail."""
    groups_max: int = Field(100_000, ge=1, le=10_000_000)
    """Groups that one submission may ask for."""
    jobs_max: int = Field(1000, ge=1)
    """Jobs of a run."""
    watchers_max: int = Field(100, ge=1)
    """Open WatchJob streams."""


def rules(config: Config, section: RouterConfig, owner_epoch: int) -> RouterRules:
    """The machine's rules for one incarnation."""
    return RouterRules(
        run=config.run,
        owner_epoch=owner_epoch,
        groups_per_batch=config.groups_per_batch,
        repairs_max=config.repairs_max,
        lag_max=section.lag_max,
        episodes_max=section.episodes_max,
        evaluation_share=section.evaluation_share,
        turns_max=section.turns_max,
        turn_tokens_max=section.turn_tokens_max,
        episode_tokens_max=section.episode_tokens_max,
        context_tokens_max=section.context_tokens_max,
        command_bytes_max=section.command_bytes_max,
        box_steps_max=section.box_steps_max,
        step_timeout_s=section.step_timeout_s,
        episode_timeout_s=section.episode_timeout_s,
        generate_timeout_s=section.generate_timeout_s,
        unparseable_max=section.unparseable_max,
        generate_retries_max=section.generate_retries_max,
        box_retries_max=section.box_retries_max,
        hold_max_s=section.hold_max_s,
        infra_ceiling=section.infra_ceiling,
        infra_pause_s=section.infra_pause_s,
        stall_s=section.stall_s,
        placement=section.placement,
        admission=section.admission,
        rank=section.rank,
        probes=True,
        interleave_groups=section.interleave_groups,
        reserve_tokens=min(section.reserve_tokens, section.context_tokens_max),
        launch_fill=section.launch_fill,
        hold_fill=section.hold_fill,
        credit_ttl_max_s=section.credit_ttl_max_s,
        migrate_prefill_s=section.migrate_prefill_s,
        keepalive_tokens=section.keepalive_tokens,
        prefill_base_s=section.prefill_base_s,
        prefill_linear_s=section.prefill_linear_s,
        prefill_square_s=section.prefill_square_s,
        decode_base_s=section.decode_base_s,
        decode_request_s=section.decode_request_s,
        decode_context_s=section.decode_context_s,
        fair_hold_s=section.fair_hold_s,
        prefix_block_tokens=section.prefix_block_tokens,
        prefix_entries_max=section.prefix_entries_max,
        probe_timeout_s=section.probe_timeout_s,
        probe_pause_s=section.probe_pause_s,
        probe_pause_max_s=max(section.probe_pause_s, section.probe_pause_max_s),
        wedge_s=section.wedge_s,
        slow_ratio=section.slow_ratio,
        limits=Limits(
            memory_bytes=section.box_memory_bytes,
            pids=section.box_pids,
            disk_bytes=section.box_disk_bytes,
            disk_inodes=section.box_disk_inodes,
            output_bytes=section.box_output_bytes,
            cpus=section.box_cpus,
        ),
    )
