"""The figures of a run: carriers, and how they leave for programs.

Owns: names and units of the figures (DESIGN §9), JSON. Promise: no I/O; times are seconds; None
where the record does not say. Does not cover: how they are computed (report.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from muster.bias import Bias
from muster.entries import Publication, PublicationTimes, Step
from muster.types import Value


class Trained(Value, frozen=True):
    """What the trainer reported of the batch's step, and the way of the version to the engines.

    `decoding_share`: of the time of its training, that in which replicas decoded (mean over them);
    None where the record does not say."""

    version: int
    parent: int
    digest: str
    step_kl: float | None  # None: not measured
    step: Step
    publications: tuple[Publication, ...]
    times: PublicationTimes = PublicationTimes()
    decoding_share: float | None = None


class EpisodeOf(Value, frozen=True):
    """One episode of a batch, under the name that `muster replay` and `muster explain` take."""

    id: str  # GROUP.SIBLING.ATTEMPT
    ended: str  # "outcome/cause"
    took_s: float  # from its first recorded second to its end


class BatchReport(Value, frozen=True):
    """One batch. `split` sums to `time_to_trainable_batch_s`."""

    step: int
    stage: str  # frozen or trained
    groups: int
    trajectories: int
    time_to_trainable_batch_s: float
    cold: bool  # counted from SubmitTaskSet: the trainer had asked before, or it is the first
    split: dict[str, float]
    straggler_tail_s: float
    gpu_seconds_waiting_on_environments: float  # within that time, over all replicas
    interval_s: float | None  # since the former batch was complete
    think_s: float | None  # from the former batch complete to the trainer asking again
    outcomes: dict[str, int]  # "outcome/cause" → trajectories
    pass_rate: float | None  # successes among valid trajectories
    reward_mean: float | None  # of valid trajectories
    groups_with_variance: int  # by the rewards of valid siblings
    groups_zero_variance: tuple[str, ...]
    lag_mean: float | None  # versions, from the first sampled token, at the optimizer step
    lag_max: int | None
    turns: int
    tokens_prompt: int  # sent to an engine, turn by turn
    tokens_cached: int  # of those, found in its prefix cache
    tokens_sampled: int
    repairs: int  # attempts before the ones that count
    repair_causes: dict[str, int]
    replays: int  # boxes rebuilt by replay
    replay_reasons: dict[str, int]
    trained: Trained | None
    slowest: tuple[EpisodeOf, ...] = ()  # that ended last, at most 3
    failed: tuple[EpisodeOf, ...] = ()  # without success, invalid ones first, at most 3


class Drift(Value, frozen=True):
    """The bank's bounds on drift (KL per token) against what was measured; None without any.

    Of trained trajectories, as the trainer measured them (means over steps); and of groups that the
    bank refused unmeasured (`stale_kl`), those that a replica scored all the same. `refused`,
    `refused_scored`: groups that the bank refused by the bound, by a score. `returned`: those that
    the trainer gave back.
    """

    trained_predicted_kl: float | None = None
    trained_measured_kl: float | None = None
    refused: int = 0
    refused_scored: int = 0
    returned: int = 0
    calibrated: int = 0
    calibrated_predicted_kl: float | None = None
    calibrated_scored_kl: float | None = None


class RunTotals(Value, frozen=True):
    """The whole run."""

    jobs: int
    groups: int
    groups_trained: int
    groups_filtered: int
    groups_evaluated: int
    groups_open: int
    trajectories: int
    outcomes: dict[str, int]
    filtered_reasons: dict[str, int]
    tokens_prompt: int  # of all recorded turns' requests …
    tokens_cached: int  # … those of them that the engine found in its prefix cache …
    cached_token_share: float | None  # … and their share; None without any
    tokens_sampled: int
    repairs: int
    repair_causes: dict[str, int]
    replays: int
    replay_reasons: dict[str, int]
    turns_replayed: int
    steps_resumed: int
    flaky_by_task: dict[str, int]
    groups_retired: int  # known by their totals alone; beside the others
    versions_published: int
    wall_s: float  # first submission to last batch complete
    drift: Drift = Drift()


class Bottleneck(Value, frozen=True):
    """The largest part of the time to trainable batches, and what would move it."""

    part: str
    share: float
    setting: str
    advice: str


class EngineReport(Value, frozen=True):
    """One replica. Peak: its best rate over a second of this run, for want of a calibration."""

    replica: str
    turns: int  # recorded turns that it sampled …
    cached_token_share: float | None  # … and the share of their prompts that its cache had
    peak_tokens_per_s: float
    gpu_seconds_waiting_on_environments: float


class RunReport(Value, frozen=True):
    """Everything that `muster report` shows."""

    run: str
    batches: tuple[BatchReport, ...]
    totals: RunTotals
    bottleneck: Bottleneck | None
    engines: tuple[EngineReport, ...]
    bias: Bias
    remarks: tuple[str, ...]
    format: int = 2


def as_json(found: object) -> str:
    """Indented JSON of a report or an audit; what is not finite is null, escapes are inert."""
    text = msgspec.json.format(msgspec.json.encode(found), indent=2).decode()
    return "".join(c if ord(c) < 127 else _escaped(c) for c in text)


def report_json(found: RunReport) -> str:
    """The report, and beside it `figures`: every number of it under one dotted name."""
    nested = msgspec.to_builtins(found)
    return as_json({**nested, "figures": dict(flat(found))})


def flat(found: RunReport) -> Iterator[tuple[str, float | int | bool | None]]:
    """Each figure with a name of its own: batch.2.split.tool, bias.ks_tokens_max."""
    nested = msgspec.to_builtins(found)
    for batch in nested["batches"]:
        yield from _leaves(f"batch.{batch['step']}", batch)
    for name in ("totals", "bias", "bottleneck"):
        yield from _leaves(name, nested[name])
    for engine in nested["engines"]:
        yield from _leaves(f"engine.{engine['replica']}", engine)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, float | int | bool | None]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}", inner)
    elif isinstance(value, list | tuple):
        for at, inner in enumerate(value):
            yield from _leaves(f"{name}.{_named(inner, at)}", inner)
    elif value is None or isinstance(value, int | float):
        yield name, value


def _named(inner: Any, at: int) -> str:
    """Publications by replica, cohorts by the batch before them, everything else by place."""
    for key in ("replica", "after_batch"):
        if isinstance(inner, dict) and key in inner:
            return str(inner[key])
    return str(at)


def _escaped(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))
