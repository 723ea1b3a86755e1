"""How long things take and how often they fail, in the simulation.

Owns: the numbers. Times are means in seconds, exponential unless said otherwise.
"""

from __future__ import annotations

from msgspec.structs import replace

from muster.types import Value


class Model(Value, frozen=True):
    """One setting of the world."""

    groups: int = 16
    evaluated: int = 0  # groups of an evaluation beside them
    group_size: int = 3
    groups_per_batch: int = 4
    lag_max: int = 1
    repairs_max: int = 2
    replicas: int = 2
    hosts: int = 2
    boxes_max: int = 8
    standbys: bool = True
    latency_s: float = 0.002
    box_s: float = 0.1
    generate_s: float = 0.8
    step_s: float = 0.5
    verify_s: float = 0.3
    train_s: float = 2.0
    save_s: float = 0.05  # a checkpoint
    store_s: float = 0.0  # until what was written is durable, or read
    publish_s: float = 0.2
    solved: float = 0.4
    boxes_survive: float = 0.5  # of the deaths of a sandbox service: its boxes live on
    done: float = 0.35  # the model says DONE
    silly: float = 0.05  # the model says nothing that can be read
    dates: float = 0.1  # its command prints the time
    turns_max: int = 4
    episode_s: float = 40.0  # in which the model may act
    checkpoint_every: int = 1
    checkpoints_kept: int = 3
    ahead_max: int = 0  # above 0: training and publication overlap (trainer.loop = "async")
    # drift of the policy, KL per token; 0 turns that off
    returns: float = 0.0  # share of its batches of which the trainer gives groups back
    step_kl: float = 0.0  # of one step
    kl_sure: float = 0.02
    kl_refuse: float = 0.0
    score_s: float = 0.5
    # replicas and the router's policies
    kv_tokens: int = 1 << 20  # of one replica
    placement: str = "sticky_least_loaded"
    admission: str = "none"
    probes: bool = False
    wedge_s: float = 4.0
    # faults
    faults_mean: float = 0.0
    faults_until_s: float = 60.0
    power_cuts: bool = False
    kinds: tuple[str, ...] = ()  # of faults (faults.Kind); none: all of them
    # two-speed tasks: exact durations of the one step of "fast" and "slow" tasks, 0 for neither
    fast_s: float = 0.0
    slow_s: float = 0.0


CALM = Model()
POLICIES = {"placement": "predicted_finish", "admission": "kv_fit", "probes": True}
# Few conversations fit a replica, so that many are held.
TIGHT = replace(CALM, kv_tokens=640, **POLICIES)
# Many boxes die and cannot be rebuilt, so that groups are filtered; at lag 0.
LOSSY = replace(
    TIGHT, lag_max=0, dates=1.0, done=0.0, repairs_max=0, faults_mean=60.0, faults_until_s=40.0
)
# Many boxes die and are rebuilt.
FRAIL = replace(
    TIGHT, dates=0.0, done=0.1, repairs_max=4, step_s=1.5, faults_mean=60.0, faults_until_s=40.0
)
# The same, and nothing else happens.
BOXES_GO = replace(FRAIL, faults_mean=150.0, kinds=("box_lost", "boxes_lost"))
ROUGH = replace(TIGHT, groups=32, faults_mean=25.0, faults_until_s=90.0)
# One sort of fault only.
CUT_OFF = replace(ROUGH, kinds=("partition",))
STOPPED = replace(ROUGH, kinds=("hang", "delay"), faults_mean=80.0)
FORGETFUL = replace(ROUGH, kinds=("store_power_cut",), power_cuts=True)
# Writes and answers are lost while more groups are complete than the trainer can take.
BACKLOG = replace(
    ROUGH,
    groups_per_batch=2,
    lag_max=4,
    train_s=6.0,
    kv_tokens=1 << 20,
    kinds=("lost_reply", "lost_request", "lie"),
)
