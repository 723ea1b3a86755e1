"""The figures of a run as rows: one for each step, publication and evaluation.

Owns: what a row holds, which rows are due, the lines of a run. Promise: pure; a version number is
never used twice, so a row is named by its version (an evaluation's by its job) and stands once,
however often the same records are read; a trainer that goes back begins a new line: what it makes
again stands beside what it made before, and a row of kind `rollback` says so. Does not cover: files
(tracking_files.py), reading the streams (the trainer's tracker).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from muster.evaluated import EvaluatedGroup
from muster.evaluation import overall_of, tasks_of
from muster.figures import BatchReport
from muster.types import Value
from muster.v1 import common_pb2 as pb
from muster.v1 import events_pb2 as ev

Figures = dict[str, float]
_NUMBERS = {
    *(FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT),
    *(FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64),
}


class Row(Value, frozen=True):
    """One line of steps.jsonl. `figures`: finite, by name; `a/b` groups them on a board."""

    kind: str  # step, publication, evaluation, rollback
    step: int  # optimizer step; an evaluation's: of the newest version that it ran on
    version: int
    line: int  # 1, and one more after each rollback
    at_unix_s: float
    figures: Figures = {}
    parent: int = 0
    job: str = ""  # of an evaluation

    @property
    def key(self) -> tuple[str, int | str]:
        """What it stands for, once in a run."""
        return self.kind, self.job or self.version


class Book:
    """What was tracked, and so what is due. Feed it the records in the order of their streams."""

    def __init__(self, rows: Iterable[Row] = ()):
        self._keys: set[tuple[str, int | str]] = set()
        self._steps: dict[int, tuple[int, int]] = {0: (0, 1)}  # version → its step, its line
        self._line, self._newest = 1, 0  # step of the newest row of this line
        self._groups: dict[str, int] = {}  # evaluation → groups asked for
        self._found: dict[str, dict[str, EvaluatedGroup]] = {}
        for row in rows:
            self._wrote(row)

    def _wrote(self, row: Row) -> None:
        self._keys.add(row.key)
        self._line = max(self._line, row.line)
        if row.kind == "step":
            self._steps[row.version] = row.step, row.line
        if row.kind in ("step", "rollback"):
            self._newest = row.step

    def _due(self, row: Row) -> list[Row]:
        if row.key in self._keys:
            return []
        self._wrote(row)
        return [row]

    def version(self, record: ev.PolicyVersionRecord) -> list[Row]:
        """The rows that a record of the versions stream makes due."""
        if record.stage == ev.VERSION_STAGE_UNSPECIFIED:
            return []
        if record.stage == ev.VERSION_STAGE_PUBLISHED:
            return self._publication(record)
        if not record.HasField("step") or ("step", record.version) in self._keys:
            return []
        step, rows = record.step.step, []
        if step <= self._newest:
            back = Row("rollback", step - 1, record.version, self._line + 1, record.at_unix_s)
            rows += self._due(back)
        figures = numbers("train", record.step)
        if record.HasField("step_kl"):
            figures["train/step_kl"] = record.step_kl
        for bucket in record.step.mismatch:
            name = f"mismatch/lag_{bucket.lag_versions}_from_{bucket.position_from}"
            figures[f"{name}/k3"] = bucket.k3
            figures[f"{name}/ess_token"] = bucket.ess_token
        at = (record.version, self._line, record.at_unix_s)
        return rows + self._due(Row("step", step, *at, finite(figures), record.parent))

    def _publication(self, record: ev.PolicyVersionRecord) -> list[Row]:
        told = [p for p in record.publications if not p.error]
        if not record.publications:
            return []
        timed = ("latency_s", "pause_s", "token_gap_s", "receive_s", "apply_s") if told else ()
        figures = {f"publication/{name}": max(getattr(p, name) for p in told) for name in timed}
        figures["publication/replicas"] = len(told)
        figures["publication/replicas_missed"] = len(record.publications) - len(told)
        for name in ("tokens_lost", "requests_recomputed", "requests_aborted", "requests_kept"):
            figures[f"publication/{name}"] = sum(getattr(p, name) for p in told)
        step, line = self._steps.get(record.version, (record.step.step, self._line))
        at = (record.version, line, record.at_unix_s)
        return self._due(Row("publication", step, *at, finite(figures), record.parent))

    def job(self, record: ev.JobRecord) -> list[Row]:
        """Of the jobs stream: how many groups an evaluation has."""
        if record.purpose == pb.JOB_PURPOSE_EVALUATE and not record.cancelled:
            self._groups[record.job] = record.groups
        return self._evaluation(record.job)

    def group(self, found: EvaluatedGroup) -> list[Row]:
        """Of the evaluations stream; the last of an evaluation makes its row due."""
        self._found.setdefault(found.job, {})[found.group] = found
        return self._evaluation(found.job)

    def _evaluation(self, job: str) -> list[Row]:
        groups = list(self._found.get(job, {}).values())
        if not groups or len(groups) < self._groups.get(job, math.inf):
            return []
        del self._found[job]
        version = max((v for group in groups for v in group.versions), default=0)
        step, line = self._steps.get(version, (0, self._line))
        at = max(group.complete_unix_s for group in groups)
        return self._due(Row("evaluation", step, version, line, at, evaluation(groups), job=job))


def evaluation(groups: Sequence[EvaluatedGroup]) -> Figures:
    """The figures of one evaluation, its tasks' pass rates included."""
    tasks = tasks_of(groups)
    overall = overall_of(tasks, groups)
    figures: dict[str, Any] = {
        f"evaluation/{name}": getattr(overall, name)
        for name in (
            *("pass_rate", "reward_mean", "samples", "valid", "infra", "repaired"),
            *("turns_mean", "sampled_tokens_mean", "tasks", "tasks_solved"),
        )
    }
    if overall.pass_interval is not None:
        figures["evaluation/pass_rate_low"] = overall.pass_interval.low
        figures["evaluation/pass_rate_high"] = overall.pass_interval.high
    for task in tasks:
        figures[f"evaluation_tasks/{task.task}"] = task.pass_rate
    return finite(figures)


def batch(report: BatchReport) -> Figures:
    """What the streams say of the batch that a step was made of."""
    many = max(1, report.trajectories)
    names = (
        *("time_to_trainable_batch_s", "straggler_tail_s", "interval_s", "think_s", "pass_rate"),
        *("reward_mean", "groups_with_variance", "lag_mean", "lag_max", "trajectories"),
        *("gpu_seconds_waiting_on_environments", "repairs", "replays"),
        *("tokens_prompt", "tokens_cached", "tokens_sampled"),
    )
    figures: dict[str, Any] = {f"batch/{name}": getattr(report, name) for name in names}
    figures["batch/sampled_tokens_mean"] = report.tokens_sampled / many
    figures["batch/turns_mean"] = report.turns / many
    figures |= {f"batch_split/{part}_s": took for part, took in report.split.items()}
    figures |= {f"batch_outcomes/{name}": count for name, count in report.outcomes.items()}
    return finite(figures)


def numbers(group: str, message: Any) -> Figures:
    """Every number of a message under its own name: fields of later releases too. Nothing of what
    was not measured: absent fields, and a report that has its step alone."""
    if {field.name for field, _ in message.ListFields()} <= {"step"}:
        return {}
    return {
        f"{group}/{field.name}": float(getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
        if field.cpp_type in _NUMBERS and not field.is_repeated and field.name != "step"
        if not field.has_presence or message.HasField(field.name)
    }


def finite(figures: Mapping[str, float | int | None]) -> Figures:
    """Without what is unknown or not finite: neither JSON nor a board has a word for it."""
    return {n: float(v) for n, v in figures.items() if v is not None and math.isfinite(v)}
