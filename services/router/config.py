"""Section [router] of the configuration.

Owns: the values and their bounds. Promise: every limit of the router is here. Does not cover:
what the whole run shares (groups_per_batch, repairs_max: top level).
"""

from __future__ import annotations

from pydantic import Field

from muster.config import Config, Section
from muster.types import Limits
from services.router.rules import RouterRules


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
    """Longest wait of an episode for a replica."""
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
        limits=Limits(
            memory_bytes=section.box_memory_bytes,
            pids=section.box_pids,
            disk_bytes=section.box_disk_bytes,
            disk_inodes=section.box_disk_inodes,
            output_bytes=section.box_output_bytes,
            cpus=section.box_cpus,
        ),
    )
