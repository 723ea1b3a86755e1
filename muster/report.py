"""What a run achieved and where its time went, batch by batch.

Owns: the figures of DESIGN §9 that follow from the record alone. Promise: pure; each figure is
computed in one place, None where the record does not say. Times are seconds.
Does not cover: tables for people (report_view.py), whether the record adds up (audit.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean

import msgspec

from muster.errors import NotFound
from muster.record import Batch, Labelled, Publication, RunRecord, Step
from muster.run_index import RunIndex, lag
from muster.split import PARTS, Lane, split, straggler_tail
from muster.types import Fate, Outcome, StateInterval, Value


class Trained(Value, frozen=True):
    """What the trainer reported of the batch's step, and the way of the version to the engines."""

    version: int
    parent: int
    digest: str
    step_kl: float
    step: Step
    publications: tuple[Publication, ...]


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
    interval_s: float | None  # since the former batch was complete
    think_s: float | None  # from the former batch complete to the trainer asking again
    outcomes: dict[str, int]  # "outcome/cause" → trajectories
    pass_rate: float | None  # successes among valid trajectories
    reward_mean: float | None  # of valid trajectories
    groups_with_variance: int  # by the rewards of valid siblings
    lag_mean: float | None  # versions, from the first sampled token, at the optimizer step
    lag_max: int | None
    turns: int
    tokens_prompt: int  # sent to an engine, turn by turn
    tokens_cached: int  # of those, found in its prefix cache
    tokens_sampled: int
    repairs: int  # attempts before the ones that count
    trained: Trained | None


class RunTotals(Value, frozen=True):
    """The whole run."""

    jobs: int
    groups: int
    groups_trained: int
    groups_filtered: int
    groups_open: int
    trajectories: int
    outcomes: dict[str, int]
    filtered_reasons: dict[str, int]
    tokens_sampled: int
    repairs: int
    versions_published: int
    wall_s: float  # first submission to last batch complete


class Bottleneck(Value, frozen=True):
    """The largest part of the time to trainable batches, and what would move it."""

    part: str
    share: float
    setting: str
    advice: str


class RunReport(Value, frozen=True):
    """Everything that `muster report` shows."""

    run: str
    batches: tuple[BatchReport, ...]
    totals: RunTotals
    bottleneck: Bottleneck | None
    format: int = 1


TRAINER, PUBLICATION = "trainer", "publication"
SETTINGS: dict[str, tuple[str, str]] = {
    "queue": ("router.lag_max", "raise it: groups are then launched while the trainer works"),
    "prefill": ("inference.kv_cache_gib", "raise it: prefixes then stay cached between turns"),
    "decode": ("router.turn_tokens_max", "lower it, or start another inference replica"),
    "box_start": ("sandbox.starting_max", "raise it, or start another sandbox host"),
    "tool": ("router.step_timeout_s", "lower it, or start another sandbox host"),
    "verify": ("sandbox.verifying_max", "raise it, or make the tasks' tests faster"),
    "hold": ("inference.max_requests", "raise it, or start another inference replica"),
    "transfer": ("redis.url", "name a nearer or faster server"),
    TRAINER: ("trainer.micro_batch_tokens", "raise it while memory allows: batches wait for it"),
    PUBLICATION: ("trainer.transport", "nccl between GPUs; with gloo, fewer or nearer replicas"),
}
"""Part of the split → the setting of muster.toml that moves it, and which way."""


def report(record: RunRecord, only: int | None = None) -> RunReport:
    """The report of a run, or of one batch of it (totals are always the run's).

    Raises NotFound for a batch that is not there.
    """
    index = RunIndex(record)
    steps = sorted({*index.frozen, *index.trained})
    if only is not None and only not in steps:
        raise NotFound(
            "there is no such batch",
            field="batch",
            value=only,
            way_out=f"batches of run {record.run}: 1 to {steps[-1]}" if steps else "none so far",
        )
    batches = [_batch(index, step, steps) for step in steps if only is None or step == only]
    return RunReport(record.run, tuple(batches), _totals(index), bottleneck(batches))


def as_json(found: object) -> str:
    """Indented JSON of a report or an audit; what is not finite is null, escapes are inert."""
    text = msgspec.json.format(msgspec.json.encode(found), indent=2).decode()
    return "".join(c if ord(c) < 127 else _escaped(c) for c in text)


def _escaped(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


def bottleneck(batches: Sequence[BatchReport]) -> Bottleneck | None:
    """None before the first batch.

    While the trainer waits longer for batches than it works between them, the largest part of
    the split; else its step, or the way of its weights to the replicas.
    """
    if not batches:
        return None
    waited = math.fsum(b.time_to_trainable_batch_s for b in batches)
    worked = math.fsum(max(b.think_s or 0.0, 0.0) for b in batches)
    parts = {part: math.fsum(b.split[part] for b in batches) for part in PARTS}
    whole = waited
    if worked >= waited and worked > 0:
        slowest = [
            max((p.latency_s for p in b.trained.publications), default=0.0) if b.trained else 0.0
            for b in batches[:-1]  # that of the last one is not part of any think-time here
        ]
        published = min(math.fsum(slowest), worked)
        parts = {PUBLICATION: published, TRAINER: worked - published}
        whole = waited + worked
    part = max(parts, key=lambda p: parts[p])
    return Bottleneck(part, parts[part] / whole if whole else 0.0, *SETTINGS[part])


def _think(batch: Batch, former: Batch | None) -> float | None:
    """From the former batch to the trainer asking again; unknown when it was restarted between."""
    if former is None or former.trainer_epoch != batch.trainer_epoch:
        return None
    return batch.asked_unix_s - former.complete_unix_s


def _batch(index: RunIndex, step: int, steps: list[int]) -> BatchReport:
    batch = index.batch(step)
    former = index.batch(step - 1) if step - 1 in steps else None
    start, cold = _asked(index, batch, first=step == steps[0])
    members = index.member_ids(batch.members)
    turns = [turn for episode in members for turn in index.turns.get(episode, ())]
    labels = [label for episode in members for label in index.labels.get(episode, ())[:1]]
    lags = _lags(index, batch, members)
    lanes = [_lane(index, m.group, n, a) for m in batch.members for n, a in enumerate(m.attempts)]
    return BatchReport(
        step=step,
        stage="trained" if batch.trained else "frozen",
        groups=len(batch.members),
        trajectories=len(members),
        time_to_trainable_batch_s=max(0.0, batch.complete_unix_s - start),
        cold=cold,
        split=split(lanes, start, batch.complete_unix_s),
        straggler_tail_s=straggler_tail(
            [lane.done_unix_s for lane in lanes if math.isfinite(lane.done_unix_s)]
        ),
        interval_s=batch.complete_unix_s - former.complete_unix_s if former else None,
        think_s=_think(batch, former),
        outcomes=_outcomes(labels),
        pass_rate=_mean(
            float(x.label.outcome is Outcome.MODEL_SUCCESS) for x in labels if x.label.outcome.valid
        ),
        reward_mean=_mean(r for r in map(_reward, labels) if r is not None),
        groups_with_variance=_with_variance(labels),
        lag_mean=_mean(lags),
        lag_max=max(lags, default=None),
        turns=len(turns),
        tokens_prompt=sum(t.prompt_tokens for t in turns),
        tokens_cached=sum(t.cached_tokens for t in turns),
        tokens_sampled=sum(t.sampled_tokens for t in turns),
        repairs=sum(attempt for m in batch.members for attempt in m.attempts),
        trained=_trained(index, step),
    )


def _asked(index: RunIndex, batch: Batch, *, first: bool) -> tuple[float, bool]:
    """When the clock started; and True when that was the submission and not the trainer."""
    jobs = {index.opened[m.group][0].job for m in batch.members if m.group in index.opened}
    submitted = [index.jobs[job][0].submitted_unix_s for job in jobs if job in index.jobs]
    if not submitted:
        return batch.asked_unix_s, False
    # The last job that was needed: before it the batch could not even have been begun.
    begun = min(submitted) if first else max(submitted)
    if first or begun > batch.asked_unix_s:
        return begun, True
    return batch.asked_unix_s, False


def _lane(index: RunIndex, group: str, sibling: int, attempt: int) -> Lane:
    intervals: list[StateInterval] = []
    done = math.inf
    for number, events in sorted(index.attempts.get((group, sibling), {}).items()):
        if number <= attempt:
            intervals += [interval for event in events for interval in event.intervals]
    for end in index.finished.get(f"{group}.{sibling}.{attempt}", ())[:1]:
        done = end.finished_unix_s
    return Lane(tuple(intervals), done)


def _lags(index: RunIndex, batch: Batch, members: Iterable[str]) -> list[int]:
    parents, base = index.parents(), index.base(batch)
    firsts = [
        next((s.version for t in index.turns.get(episode, ()) for s in t.spans), None)
        for episode in members
    ]
    found = [lag(parents, first, base) for first in firsts if first is not None]
    return [versions for versions in found if versions is not None]


def _trained(index: RunIndex, step: int) -> Trained | None:
    made = index.made_by(step)
    if not made or made[-1].step is None:
        return None
    version = made[-1]
    published = tuple(p for v in index.versions[version.version] for p in v.publications)
    return Trained(
        version.version, version.parent, version.digest, version.step_kl, made[-1].step, published
    )


def _totals(index: RunIndex) -> RunTotals:
    record = index.record
    submitted = [job.submitted_unix_s for job in record.jobs if not job.cancelled]
    complete = [batch.complete_unix_s for batch in record.batches]
    filtered = [fate for fate in record.fates if fate.fate is Fate.FILTERED]
    return RunTotals(
        jobs=len(index.jobs),
        groups=len(index.opened),
        groups_trained=len(index.fated(Fate.TRAINED)),
        groups_filtered=len(index.fated(Fate.FILTERED)),
        groups_open=sum(group not in index.fates for group in index.opened),
        trajectories=len(index.finished),
        outcomes=_outcomes(record.labels),
        filtered_reasons=dict(Counter(fate.reason for fate in filtered).most_common()),
        tokens_sampled=sum(turn.sampled_tokens for turn in record.turns),
        repairs=sum(max(attempts) for attempts in index.attempts.values()),
        versions_published=len({v.version for v in record.versions if v.published}),
        wall_s=max(0.0, max(complete) - min(submitted)) if complete and submitted else 0.0,
    )


def _outcomes(labels: Iterable[Labelled]) -> dict[str, int]:
    return dict(Counter(f"{x.label.outcome}/{x.label.cause}" for x in labels).most_common())


def _reward(labelled: Labelled) -> float | None:
    label = labelled.label
    return label.reward if label.outcome.valid else None


def _with_variance(labels: Iterable[Labelled]) -> int:
    rewards: dict[str, set[float]] = {}
    for labelled in labels:
        reward = _reward(labelled)
        if reward is not None:
            rewards.setdefault(labelled.key.group, set()).add(reward)
    return sum(len(different) > 1 for different in rewards.values())


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None
