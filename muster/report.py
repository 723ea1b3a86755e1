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

from muster.bias import bias
from muster.bottleneck import PUBLICATION, SETTINGS, TRAINER, bottleneck
from muster.drift import drift
from muster.engines import Engine, engines
from muster.entries import Batch, Labelled, PublicationTimes, RunRecord, Step, Turn
from muster.errors import NotFound
from muster.figures import (
    BatchReport,
    Bottleneck,
    EngineReport,
    RunReport,
    RunTotals,
    Trained,
    as_json,
)
from muster.lanes import lane
from muster.named import failed, slowest
from muster.repairs import equal_rewards, flaky_by_task, of_members, remarks, repairs
from muster.run_index import RunIndex, lag
from muster.split import split, straggler_tail
from muster.types import Fate, Outcome, Purpose

__all__ = [
    "PUBLICATION",
    "SETTINGS",
    "TRAINER",
    "BatchReport",
    "Bottleneck",
    "RunReport",
    "as_json",
    "bottleneck",
    "report",
]


def report(record: RunRecord, only: int | None = None) -> RunReport:
    """The report of a run, or of one batch of it (totals are always the run's).

    Raises NotFound for a batch that is not there.
    """
    index = RunIndex(record)
    steps = sorted(index.steps)
    if only is not None and only not in steps:
        raise NotFound(
            "there is no such batch",
            field="batch",
            value=only,
            way_out=f"batches of run {record.run}: 1 to {steps[-1]}" if steps else "none so far",
        )
    ran = engines(index)
    batches = [_batch(index, step, steps, ran) for step in steps if only is None or step == only]
    return RunReport(
        record.run,
        tuple(batches),
        _totals(index),
        bottleneck(batches),
        tuple(_engine(e, record.turns) for e in ran),
        bias(index),
        tuple(remarks(index)),
    )


def _engine(engine: Engine, turns: Iterable[Turn]) -> EngineReport:
    mine = [turn for turn in turns if turn.replica == engine.replica]
    prompts = sum(turn.prompt_tokens for turn in mine)
    return EngineReport(
        engine.replica,
        len(mine),
        sum(turn.cached_tokens for turn in mine) / prompts if prompts else None,
        engine.peak_tokens_per_s,
        engine.waiting_s(-math.inf, math.inf),
    )


def _think(batch: Batch, former: Batch | None) -> float | None:
    """From the former batch to the trainer asking again; unknown when it was restarted between."""
    if former is None or former.trainer_epoch != batch.trainer_epoch:
        return None
    return batch.asked_unix_s - former.complete_unix_s


def _batch(index: RunIndex, step: int, steps: list[int], ran: Sequence[Engine]) -> BatchReport:
    batch = index.batch(step)
    former = index.batch(step - 1) if step - 1 in steps else None
    start, cold = _asked(index, batch, first=step == steps[0])
    members = index.member_ids(batch.members)
    turns = [turn for episode in members for turn in index.turns.get(episode, ())]
    labels = [label for episode in members if (label := index.label(episode))]
    lags = _lags(index, batch, members)
    repaired = of_members(index, batch.members)
    lanes = [lane(index, m.group, n, a) for m in batch.members for n, a in enumerate(m.attempts)]
    return BatchReport(
        step=step,
        stage="trained" if batch.trained else "returned" if batch.short else "frozen",
        groups=len(batch.members),
        trajectories=len(members),
        time_to_trainable_batch_s=max(0.0, batch.complete_unix_s - start),
        cold=cold,
        split=split(lanes, start, batch.complete_unix_s),
        straggler_tail_s=straggler_tail(
            [lane.done_unix_s for lane in lanes if math.isfinite(lane.done_unix_s)]
        ),
        gpu_seconds_waiting_on_environments=math.fsum(
            e.waiting_s(start, batch.complete_unix_s) for e in ran
        ),
        interval_s=batch.complete_unix_s - former.complete_unix_s if former else None,
        think_s=_think(batch, former),
        outcomes=_outcomes(labels),
        pass_rate=_mean(
            float(x.label.outcome is Outcome.MODEL_SUCCESS) for x in labels if x.label.outcome.valid
        ),
        reward_mean=_mean(r for r in map(_reward, labels) if r is not None),
        groups_with_variance=_with_variance(labels),
        groups_zero_variance=tuple(
            m.group for m in batch.members if _flat(labels, m.group, len(m.attempts))
        ),
        lag_mean=_mean(lags),
        lag_max=max(lags, default=None),
        turns=len(turns),
        tokens_prompt=sum(t.prompt_tokens for t in turns),
        tokens_cached=sum(t.cached_tokens for t in turns),
        tokens_sampled=sum(t.sampled_tokens for t in turns),
        repairs=repaired.attempts,
        repair_causes=repaired.attempts_by_cause,
        replays=repaired.replays,
        replay_reasons=repaired.replays_by_reason,
        trained=_trained(index, step, ran),
        slowest=slowest(index, batch.members),
        failed=failed(index, batch.members),
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


def _lags(index: RunIndex, batch: Batch, members: Iterable[str]) -> list[int]:
    parents, base = index.parents(), index.base(batch)
    firsts = [
        next((s.version for t in index.turns.get(episode, ()) for s in t.spans), None)
        for episode in members
    ]
    found = [lag(parents, first, base) for first in firsts if first is not None]
    return [versions for versions in found if versions is not None]


def _trained(index: RunIndex, step: int, ran: Sequence[Engine]) -> Trained | None:
    made = index.made_by(step)
    version = made[-1] if made else None
    if version is None or version.step is None:
        return None
    records = index.versions[version.version]
    return Trained(
        version=version.version,
        parent=version.parent,
        digest=version.digest,
        step_kl=version.step_kl,
        step=version.step,
        publications=tuple(p for v in records for p in v.publications),
        times=next((v.times for v in records if v.published), PublicationTimes()),
        decoding_share=_decoding_share(version.step, ran),
    )


def _decoding_share(step: Step, ran: Sequence[Engine]) -> float | None:
    """How much of the training went on beside generation, as replicas' mean."""
    ended, took = step.ended_unix_s, step.train_s
    if not ended or not took:
        return None
    return _mean(engine.decoding_s(ended - took, ended) / took for engine in ran)


def _totals(index: RunIndex) -> RunTotals:
    record = index.record
    trains = [job for job in record.jobs if job.purpose is Purpose.TRAIN]
    submitted = [job.submitted_unix_s for job in trains if not job.cancelled]
    complete = [batch.complete_unix_s for batch in record.batches]
    filtered = [fate for fate in record.fates if fate.fate is Fate.FILTERED]
    repaired = repairs(index)
    prompts = sum(turn.prompt_tokens for turn in record.turns)
    cached = sum(turn.cached_tokens for turn in record.turns)
    return RunTotals(
        jobs=len(index.jobs),
        groups=len(index.opened),
        groups_trained=len(index.fated(Fate.TRAINED)),
        groups_filtered=len(index.fated(Fate.FILTERED)),
        groups_evaluated=len(index.fated(Fate.EVALUATED)),
        groups_open=sum(group not in index.fates for group in index.opened),
        trajectories=len(index.finished),
        outcomes=_outcomes(x for episode in index.labels if (x := index.label(episode))),
        filtered_reasons=dict(Counter(fate.reason for fate in filtered).most_common()),
        tokens_prompt=prompts,
        tokens_cached=cached,
        cached_token_share=cached / prompts if prompts else None,
        tokens_sampled=sum(turn.sampled_tokens for turn in record.turns),
        repairs=repaired.attempts,
        repair_causes=repaired.attempts_by_cause,
        replays=repaired.replays,
        replay_reasons=repaired.replays_by_reason,
        turns_replayed=repaired.turns_replayed,
        steps_resumed=repaired.steps_resumed,
        flaky_by_task=flaky_by_task(index),
        groups_retired=0 if record.whole else sum(map(len, record.kept.retired_after.values())),
        versions_published=len({v.version for v in record.versions if v.published}),
        wall_s=max(0.0, max(complete) - min(submitted)) if complete and submitted else 0.0,
        drift=drift(index),
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


def _flat(labels: Iterable[Labelled], group: str, size: int) -> bool:
    return equal_rewards([x.label for x in labels if x.key.group == group], size)


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None
