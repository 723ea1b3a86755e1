"""Settings of the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from muster.config import Section
from muster.errors import ConfigError


class TrainerConfig(Section):
    """`[trainer]`: the reference GRPO trainer."""

    listen: str = "127.0.0.1:0"
    """host:port of the status service; port 0 lets the system choose."""
    epochs: int = Field(1, ge=1, le=16)
    """Optimizer steps per batch; above 1 the clip range begins to matter."""
    lr: float = Field(2e-6, gt=0, le=1)
    """Learning rate of AdamW, constant."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW: decay of the gradient's mean."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW: decay of the gradient's square."""
    weight_decay: float = Field(0.0, ge=0, le=1)
    """AdamW: decoupled weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Longer gradients are cut to this norm."""
    advantage: Literal["grpo", "grpo_unscaled", "rloo"] = "grpo"
    """How the rewards of a group become advantages, over its valid siblings: less the mean and by
    the deviation (grpo), less the mean (grpo_unscaled), less the mean of the others (rloo)."""
    eps_low: float = Field(0.2, gt=0, lt=1)
    """Clip range of the probability ratio, downwards."""
    eps_high: float = Field(0.2, gt=0, le=10)
    """Clip range of the probability ratio, upwards."""
    correction: Literal["tis", "mis", "none"] = "tis"
    """What is made of ρ, the importance weight of a token (trainer's proximal policy over engine):
    tis: min(ρ, tis_cap); mis: ρ where mis_low ≤ ρ ≤ mis_high, else the token counts for nothing;
    none: ρ is ignored, to compare with."""
    tis_cap: float = Field(2.0, ge=1, le=100)
    """Importance weights are cut to this."""
    mis_low: float = Field(0.5, ge=0, le=1)
    """mis: tokens below this weight are masked."""
    mis_high: float = Field(5.0, ge=1, le=1e6)
    """mis: tokens above this weight are masked."""
    bypass: bool = False
    """The engine's log-probabilities stand for the proximal policy: the clip then bounds the way
    from the engine to the current policy, and nothing is weighted on top. Needs correction none."""

    return_kl: float = Field(0.0, ge=0)
    """A group goes back to the bank, before the step, when the engine's policy and the trainer's
    differ by more than this on one of its trajectories (k3 per token, of the proximal recompute);
    the bank puts others in their place. 0: none ever does."""

    micro_batch_tokens: int = Field(512, ge=16, le=1 << 20)
    """Tokens per forward pass: bounds memory. One longer sequence makes a pass of its own. A row
    that fits the processor's caches is quickest."""
    logit_rows: int = Field(256, ge=1, le=1 << 16)
    """Sampled tokens whose logits over the whole vocabulary exist at one time."""
    vocabulary_chunk: int = Field(16384, ge=16, le=1 << 22)
    """Entries of the vocabulary whose logits exist at one time, for each of those tokens."""
    head_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which logits are computed; the softmax is float32 always."""
    step_kl_tokens: int = Field(512, ge=1, le=1 << 20)
    """Sampled tokens on which the drift of a step is measured after it; those of groups without
    contrast first, as they were held aside from the loss."""
    threads: int = Field(2, ge=1, le=1024)
    """Threads of PyTorch."""
    compute: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of weights and activations in a pass, and of the weights that engines get. Master
    weights and optimizer are float32 always."""
    activation_checkpointing: bool = False
    """Layers keep only their input for the backward pass and are computed again there: less memory,
    a third more work, the same gradient."""
    frozen: bool = False
    """Everything but the update: weights stay, versions are counted and published. The mismatch
    must then be the same at every lag; what it does is the system's fault, not learning's."""

    on_policy_max: float = Field(0.2, ge=0, le=10)
    """Bound on the mean |Δ log-probability| between engine and trainer under the same weights,
    looked at once after a start, before the first update; beyond it the trainer ends with an error.
    0: not looked at."""
    alarm_k3: float = Field(0.02, ge=0)
    """Warn when the mismatch (k3 per token) is above this; 0: never."""
    alarm_ess_token: float = Field(0.5, ge=0, le=1)
    """Warn when the effective share of tokens, on raw weights, is below this."""
    alarm_ess_turn: float = Field(0.1, ge=0, le=1)
    """Warn when the effective share of turns, on raw weights, is below this."""
    alarm_truncated: float = Field(0.05, ge=0, le=1)
    """Warn when the correction cuts or masks a larger share of tokens than this; 0: never."""
    alarm_step_kl: float = Field(0.05, ge=0)
    """Warn when a step moves the policy further than this, per token; 0: never."""

    policy: Literal["torch", "fake"] = "torch"
    """torch, or fake: no training and no model, for tests of the other services."""

    checkpoint_every: int = Field(1, ge=1, le=1000)
    """Optimizer steps from one checkpoint to the next. Above 1 a crash costs up to so many steps,
    which are trained again; at most readybank.unacknowledged_max."""
    checkpoint_idle_s: float = Field(30.0, ge=0, le=86400)
    """After so long without a batch the newest step is saved, whatever `checkpoint_every` says:
    until then its groups are not counted as trained."""
    checkpoints_kept: int = Field(3, ge=0, le=1000)
    """Newest checkpoints kept; 0 keeps all. What came before the oldest of them is deleted, there
    and in the ready bank."""
    start_step: int | None = Field(None, ge=0)
    """Go back to the checkpoint of this step (0: the first model), once; newer checkpoints are set
    aside. The batches that it has not seen are trained again. Without it: the newest."""

    loop: Literal["sync", "async"] = "sync"
    """sync: a step is trained when the version before it is published. async: a version is
    published from its snapshot while the next batch is leased and trained; what may be launched and
    trained on is bounded by router.lag_max and the ready bank all the same."""
    ahead_max: int = Field(1, ge=1, le=16)
    """With trainer.loop "async": no further step is trained while more versions than this have not
    ended their publication. Versions that are made while another is sent wait for its end; then the
    newest of them is sent, and those before it never are."""

    transport: Literal["gloo", "nccl", "stored", "none"] = "gloo"
    """How weights travel to the engines. none: they do not, versions are only recorded as
    published; for tests with fake engines."""
    transport_folder: str = ""
    """With transport "stored": versions are written below this folder, each run's in a folder with
    its name, and engines read them below their inference.stored_root, under the same path."""
    transport_bytes_per_s: float = Field(0.0, ge=0)
    """Most that sending takes from the line, per group (stored: that each replica's reading does);
    0: no bound. For lines that rollouts use, too."""
    active_requests: Literal["finish", "abort", "keep", "recompute"] = "recompute"
    """What becomes of requests that run when engines put new weights in place: they end first, are
    aborted and asked again, go on over KV of the older version (their tokens say so and are left
    out of the mismatch), or have their KV computed again."""
    publish_quorum: float = Field(0.0, ge=0, le=1)
    """Share of the replicas, with those that serve it already, that must hold a version before
    another one serves it. 0: each serves it as soon as it has it."""
    transport_host: str = ""
    """Address of this machine that the engines can reach, for the transfer; empty: advertise_host,
    else the address from which this machine reaches Redis."""
    publish_deadline_s: float = Field(120.0, gt=0, le=3600)
    """A replica that has not taken a version by then has missed it."""
    replica_check_s: float = Field(5.0, gt=0, le=600)
    """How often a waiting trainer looks for replicas that missed the current version."""

    lease_wait_s: float = Field(300.0, gt=0, le=86400)
    """Deadline of one lease call; when it passes, the same lease is asked for again."""
    call_deadline_s: float = Field(20.0, gt=0, le=600)
    """Deadline of every other call."""
    retry_s: float = Field(120.0, ge=0, le=86400)
    """How long the bank or Redis may be away before the trainer ends with an error."""
    retry_first_s: float = Field(0.2, gt=0, le=60)
    """First wait between two tries; it doubles up to 5 s."""


def check(mine: TrainerConfig, sections: Mapping[str, Section]) -> None:
    """What holds between settings, also the bank's and the replicas'. Raises ConfigError."""
    if mine.transport == "none" and mine.policy != "fake":
        raise ConfigError(
            "engines would go on with the first model for ever",
            field="trainer.transport",
            value=mine.transport,
            way_out='take it out; none goes with trainer.policy = "fake" alone',
        )
    if mine.bypass and mine.correction != "none":
        raise ConfigError(
            "the clip bounds the way from the engine already, so a weight on top would count it "
            "twice",
            field="trainer.correction",
            value=mine.correction,
            way_out='set it to "none", or take trainer.bypass out',
        )
    _check_masked(mine)
    if (mine.transport == "stored") != bool(mine.transport_folder):
        raise ConfigError(
            "versions are stored in a folder, and only then",
            field="trainer.transport_folder",
            value=mine.transport_folder,
            way_out='name one that trainer and engines share, with trainer.transport = "stored"',
        )
    replicas = sections.get("inference")
    longest = replicas.model_dump().get("receive_timeout_s") if replicas else None
    if longest is not None and mine.publish_deadline_s > longest:
        raise ConfigError(
            "replicas let no transfer last that long, so each would refuse every version",
            field="trainer.publish_deadline_s",
            value=mine.publish_deadline_s,
            way_out=f"set it to {longest:g} at most, or raise inference.receive_timeout_s",
        )
    bank = sections.get("readybank")
    bound = bank.model_dump().get("unacknowledged_max") if bank else None
    if bound is not None and mine.checkpoint_every > bound:
        raise ConfigError(
            f"the bank leases no more than {bound} batches that are in no checkpoint, so the "
            "trainer would wait for ever",
            field="trainer.checkpoint_every",
            value=mine.checkpoint_every,
            way_out=f"set it to {bound} at most, or raise readybank.unacknowledged_max",
        )


def _check_masked(mine: TrainerConfig) -> None:
    if mine.correction == "mis" and mine.mis_low >= mine.mis_high:
        raise ConfigError(
            "no token has a weight between these bounds but by chance",
            field="trainer.mis_high",
            value=mine.mis_high,
            way_out=f"set it above trainer.mis_low = {mine.mis_low:g}",
        )
