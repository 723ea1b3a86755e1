"""What a learning run's records say: pass rates by task, the course of the training, evidence.

Owns: the parts of a result. Promise: everything is read from what the run wrote; a sibling counts
with its newest attempt that ended, as in the bank. Does not cover: running (_learn_run.py).
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from statistics import fmean
from typing import Any

import msgspec
from redis.asyncio import Redis

from muster import payload
from muster.clean import clean
from muster.entries import Batch, Labelled, RunRecord, Turn
from muster.run_index import RunIndex, lag
from muster.types import Outcome, job_and_index

EVIDENCE = 10
_SHOWN = 400  # characters of a command or an output


def plain(value: Any) -> Any:
    """A carrier as JSON has it."""
    return msgspec.to_builtins(value)


def evaluated(record: RunRecord, job: str) -> dict[str, Any]:
    """Pass rates of a job that nothing trained on: {"passed", "samples", "tasks": {...}}."""
    tasks: dict[str, list[bool]] = defaultdict(list)
    outcomes: Counter[str] = Counter()
    tokens: list[int] = []
    index = RunIndex(record)
    for group, found in _outcomes(index, job):
        outcomes[f"{found.label.outcome}: {found.label.cause}"] += 1
        if found.label.outcome.valid:
            task = _task(index, group)
            tasks[task].append(found.label.outcome is Outcome.MODEL_SUCCESS)
            tokens.append(_tokens(index.turns.get(found.key.id, ())))
    return {
        "passed": sum(map(sum, tasks.values())),
        "samples": sum(map(len, tasks.values())),
        "tokens_mean": round(fmean(tokens), 1) if tokens else 0.0,
        "tasks": {name: [sum(seen), len(seen)] for name, seen in sorted(tasks.items())},
        "instances": sorted({index.opened[g][0].task for g, _ in _outcomes(index, job)}),
        "outcomes": dict(sorted(outcomes.items())),
    }


async def evidence(record: RunRecord, job: str, redis: Redis, *, seed: int) -> list[dict[str, Any]]:
    """Successes drawn at random: what ran in the box, what it answered, what the verifier said."""
    index = RunIndex(record)
    passed = [
        found for _, found in _outcomes(index, job) if found.label.outcome is Outcome.MODEL_SUCCESS
    ]
    drawn = random.Random(seed).sample(passed, min(EVIDENCE, len(passed)))
    return [await _told(index, found, redis) for found in drawn]


async def _told(index: RunIndex, found: Labelled, redis: Redis) -> dict[str, Any]:
    turns = []
    for turn in index.turns[found.key.id]:
        data: Any = await redis.get(turn.output_key) if turn.output_key else None
        output = payload.plain(turn.output_key, data).decode("utf-8", "replace") if data else ""
        turns.append(
            {
                "command": clean(turn.command, longest=_SHOWN),
                "exit_code": turn.exit_code,
                "output": clean(output, longest=_SHOWN),
                "box": turn.box,
                "versions": sorted({span.version for span in turn.spans}),
            }
        )
    label = found.label
    return {
        "episode": found.key.id,
        "task": index.opened[found.key.group][0].task,
        "turns": turns,
        "verdict": {"outcome": label.outcome, "cause": label.cause, "reward": label.reward},
    }


def trained(record: RunRecord) -> dict[str, Any]:
    """The course of the training, and what became of failures of the infrastructure."""
    index = RunIndex(record)
    outcomes = Counter(f"{item.label.outcome}: {item.label.cause}" for item in record.labels)
    batches = [index.trained[step][0] for step in sorted(index.trained)]
    invalid = sum(_invalid(index, batch) for batch in batches)
    return {
        "steps": [_step(index, batch) for batch in batches],
        "attempts": dict(sorted(outcomes.items())),
        "repaired": sum(item.key.attempt > 0 for item in record.finished),
        "restored_boxes": len(record.restored),
        "siblings_trained": sum(len(m.attempts) for b in batches for m in b.members) - invalid,
        "siblings_left_out": invalid,
        "instances": len({opened.task for opened in record.opened}),
    }


def _step(index: RunIndex, batch: Batch) -> dict[str, Any]:
    """One optimizer step, from the record of the version that it made."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for member in batch.members:
        for sibling, attempt in enumerate(member.attempts):
            found = index.label(f"{member.group}.{sibling}.{attempt}")
            if found and found.label.outcome.valid:
                rewards[_task(index, member.group)].append(found.label.reward or 0.0)
    all_rewards = [reward for seen in rewards.values() for reward in seen]
    made = index.made_by(batch.step)[-1:]
    told: dict[str, Any] = {
        "step": batch.step,
        "reward": round(fmean(all_rewards), 4) if all_rewards else None,
        "tasks": {name: round(fmean(seen), 3) for name, seen in sorted(rewards.items())},
        "samples": len(all_rewards),
    }
    for version, step in ((v, v.step) for v in made if v.step):
        told |= {
            "variance": step.groups_with_variance,
            "step_kl": None if version.step_kl is None else _short(version.step_kl),
            "k3": _short(step.mismatch_k3),
            "ess": _short(step.ess_fraction),
            "truncated": _short(step.truncated_share),
            "grad_norm": _short(step.grad_norm),
            "train_s": round(step.train_s, 2),
            "lag": _lag(index, batch),
        }
    return told


def _lag(index: RunIndex, batch: Batch) -> float | None:
    """Mean over the batch's episodes: versions from that of the first token to the trained one.
    None when none of them is known: all were sampled from a version that its trainer lost."""
    parents, base = index.parents(), index.base(batch)
    firsts = [
        turn.spans[0].version
        for episode in index.member_ids(batch.members)
        for turn in index.turns.get(episode, ())[:1]
        if turn.spans
    ]
    found = [known for first in firsts if (known := lag(parents, first, base)) is not None]
    return _short(fmean(found)) if found else None


def _invalid(index: RunIndex, batch: Batch) -> int:
    """Siblings of a batch whose label may not enter a gradient."""
    labels = [index.label(episode) for episode in index.member_ids(batch.members)]
    return sum(found is None or not found.label.outcome.valid for found in labels)


def _outcomes(index: RunIndex, job: str) -> list[tuple[str, Labelled]]:
    """Group and label of each of the job's siblings."""
    found = []
    for group in sorted(index.opened):
        place = job_and_index(group)
        if place is None or place[0] != job:
            continue
        for sibling in range(index.size(group)):
            label = index.outcome(group, sibling)
            if label is not None:
                found.append((group, label))
    return found


def _task(index: RunIndex, group: str) -> str:
    """The task's own name, whatever the instance."""
    return index.opened[group][0].task.partition("@")[0].removeprefix("muster/")


def _tokens(turns: Any) -> int:
    return sum(turn.sampled_tokens for turn in turns if isinstance(turn, Turn))


def _short(value: float) -> float:
    return float(f"{value:.4g}")
