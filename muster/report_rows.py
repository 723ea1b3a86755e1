"""The report's figures in words, for terminal and page alike: rows, lines, the bottleneck.

Owns: labels and units. Promise: pure; nothing here is cleaned yet, whoever shows it does that.
Does not cover: layout (report_view.py, page.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from muster.entries import Publication
from muster.figures import BatchReport, Drift, RunReport, Trained
from muster.split import PARTS
from muster.view import bias_lines, counted, number, seconds, share

Row = tuple[str, Callable[[BatchReport], str]]


def rows(shown: Sequence[BatchReport]) -> list[tuple[str, list[str]]]:
    """(label, one cell per batch); two spaces before a label: part of the row above."""
    chosen: list[Row] = [
        *_TIME,
        *[(f"  {part}", _part(part)) for part in PARTS if any(b.split[part] for b in shown)],
        *_COLLECTED,
        *[
            (f"  {name}", _outcome(name))
            for name in dict.fromkeys(name for b in shown for name in b.outcomes)
        ],
        *_TRAINED,
        *_publications(shown),
    ]
    return [(label, [show(b) for b in shown]) for label, show in chosen]


def headline(report: RunReport) -> str:
    """What the run has come to."""
    t = report.totals
    when = f"in {seconds(t.wall_s)}" if t.wall_s else "so far, no batch is complete yet"
    return (
        f"{t.groups_trained} groups trained, {t.groups_filtered} filtered, "
        + (f"{t.groups_evaluated} evaluated, " if t.groups_evaluated else "")
        + f"{t.groups_open} open; {t.trajectories} trajectories {when}"
    )


def lines(report: RunReport) -> list[str]:
    """The run's totals; only what there is."""
    t = report.totals
    found = [
        f"outcomes: {counted(t.outcomes)}",
        f"tokens of prompts {t.tokens_prompt:,}, of these cached {share(t.cached_token_share)}",
        f"tokens sampled {t.tokens_sampled:,}; repairs {t.repairs}; replays {t.replays}; "
        f"versions published {t.versions_published}; jobs {t.jobs}",
    ]
    if t.filtered_reasons:
        found.append(f"filtered because: {counted(t.filtered_reasons)}")
    if t.repairs:
        found.append(f"attempts repaired because: {counted(t.repair_causes)}")
    if t.replays:
        found.append(
            f"boxes rebuilt by replay {t.replays} ({counted(t.replay_reasons)}), "
            f"{t.turns_replayed} turns run again"
        )
    if t.steps_resumed:
        found.append(f"steps whose result a later router read from the box: {t.steps_resumed}")
    if t.flaky_by_task:
        found.append(f"verdicts that differed between two runs: {counted(t.flaky_by_task)}")
    found += _drift(t.drift)
    if t.groups_retired:
        found.append(f"{t.groups_retired} retired groups are on the bank's disk, not shown here")
    found += [
        f"replica {e.replica}: {e.turns} turns, cached {share(e.cached_token_share)} of their "
        "prompts; waited for environments "
        f"{e.gpu_seconds_waiting_on_environments:.1f} GPU-seconds "
        f"(against its best {e.peak_tokens_per_s:.0f} tokens/s)"
        for e in report.engines
    ]
    return [*found, *bias_lines(report.bias)]


def _drift(d: Drift) -> list[str]:
    """The bank's bounds against what was measured, KL per token."""
    found = []
    if d.trained_measured_kl is not None:
        found.append(
            f"drift of what was trained: at most {number(d.trained_predicted_kl)} predicted, "
            f"{number(d.trained_measured_kl)} measured by the trainer (KL per token)"
        )
    if d.refused or d.refused_scored or d.returned:
        found.append(
            f"groups too far off: {d.refused} by their bound, {d.refused_scored} by a replica's "
            f"score, {d.returned} given back by the trainer"
        )
    if d.calibrated:
        found.append(
            f"calibration: {d.calibrated} of those refused by their bound were scored all the "
            f"same: {number(d.calibrated_predicted_kl)} predicted, "
            f"{number(d.calibrated_scored_kl)} scored"
        )
    return found


def failures(shown: Sequence[BatchReport]) -> list[str]:
    """Replicas that missed a publication."""
    return [
        f"batch {b.step} was not published to {p.replica}: {p.error}"
        for b in shown
        if b.trained
        for p in b.trained.publications
        if p.error
    ]


def named(shown: Sequence[BatchReport]) -> list[str]:
    """Per batch the episodes to look at, as `muster replay` and `muster explain` take them."""
    found: list[str] = []
    for b in shown:
        slow = ", ".join(f"{e.id} ({seconds(e.took_s)}, {e.ended})" for e in b.slowest)
        known = {e.id for e in b.slowest}
        failed = ", ".join(f"{e.id} ({e.ended})" for e in b.failed if e.id not in known)
        found += [f"batch {b.step}, slowest: {slow}"] if slow else []
        found += [f"batch {b.step}, failed too: {failed}"] if failed else []
    if found:
        found.append("`muster explain EPISODE` tells what one did, `muster replay` runs it again")
    return found


def legend(shown: Sequence[BatchReport]) -> list[str]:
    """What a word of the table means, where it stands there."""
    cold = "cold: counted from the submission: the trainer had asked before it, or it is the first"
    hold = (
        "hold: waited for a replica, for room in its KV cache, or for a new router; while it lasts "
        "`muster explain` says for which"
    )
    found = [cold] if any(b.cold for b in shown) else []
    return found + ([hold] if any(b.split["hold"] for b in shown) else [])


def bottleneck_parts(report: RunReport) -> tuple[str, str]:
    """What the batches waited for, and the setting that would move it."""
    found = report.bottleneck
    if found is None:
        return "no batch is complete yet", "`muster explain` says what the first one waits for"
    what = "the trainer" if found.part == "trainer" else found.part.replace("_", " ")
    return f"{what} ({found.share:.0%} of the time)", f"setting: {found.setting}: {found.advice}"


def _part(part: str) -> Callable[[BatchReport], str]:
    def show(b: BatchReport) -> str:
        whole = b.time_to_trainable_batch_s
        share = b.split[part] / whole if whole else 0.0
        return f"{seconds(b.split[part])} {share:4.0%}"

    return show


def _outcome(name: str) -> Callable[[BatchReport], str]:
    return lambda b: str(b.outcomes.get(name, 0))


def _of(show: Callable[[Trained], str]) -> Callable[[BatchReport], str]:
    return lambda b: show(b.trained) if b.trained else "–"


def _publications(shown: Sequence[BatchReport]) -> list[Row]:
    """Three rows per replica."""
    replicas = dict.fromkeys(p.replica for b in shown if b.trained for p in b.trained.publications)
    return [
        (f"  {replica}: {label}", _publication(replica, show))
        for replica in replicas
        for label, show in _PUBLICATION
    ]


def _publication(replica: str, show: Callable[[Publication], str]) -> Callable[[BatchReport], str]:
    def found(trained: Trained) -> str:
        mine = [p for p in trained.publications if p.replica == replica]
        return "–" if not mine else "failed" if mine[-1].error else show(mine[-1])

    return _of(found)


_PUBLICATION: list[tuple[str, Callable[[Publication], str]]] = [
    ("latency", lambda p: seconds(p.latency_s)),
    ("pause", lambda p: seconds(p.pause_s)),
    ("token gap", lambda p: seconds(p.token_gap_s)),
]
_TIME: list[Row] = [
    (
        "time to trainable batch",
        lambda b: seconds(b.time_to_trainable_batch_s) + (" cold" if b.cold else ""),
    ),
]
_COLLECTED: list[Row] = [
    ("straggler tail", lambda b: seconds(b.straggler_tail_s)),
    (
        "waiting on environments (GPU s)",
        lambda b: f"{b.gpu_seconds_waiting_on_environments:.1f}",
    ),
    ("interval between batches", lambda b: seconds(b.interval_s)),
    ("trainer's own time", lambda b: seconds(b.think_s)),
    ("pass rate", lambda b: share(b.pass_rate)),
    ("mean reward", lambda b: number(b.reward_mean)),
    ("groups with variance", lambda b: f"{b.groups_with_variance} of {b.groups}"),
    ("lag mean / max (versions)", lambda b: f"{number(b.lag_mean)} / {number(b.lag_max)}"),
    ("tokens sampled", lambda b: f"{b.tokens_sampled:,}"),
    ("tokens of prompts", lambda b: f"{b.tokens_prompt:,}"),
    ("  cached", lambda b: f"{b.tokens_cached:,}"),
    ("repairs / replays", lambda b: f"{b.repairs} / {b.replays}"),
    ("outcomes", lambda b: f"{b.trajectories}"),
]
_TRAINED: list[Row] = [
    ("version", _of(lambda t: f"{t.parent} → {t.version}")),
    ("loss", _of(lambda t: number(t.step.loss))),
    ("step KL", _of(lambda t: number(t.step_kl))),
    ("mismatch k1", _of(lambda t: number(t.step.mismatch_k1))),
    ("mismatch k3", _of(lambda t: number(t.step.mismatch_k3))),
    ("mismatch max |Δlogp|", _of(lambda t: number(t.step.mismatch_max_abs))),
    (
        "drift predicted / measured (KL)",
        _of(lambda t: f"{number(t.step.predicted_kl)} / {number(t.step.measured_kl)}"),
    ),
    ("groups given back", _of(lambda t: str(t.step.groups_returned))),
    ("training", _of(lambda t: seconds(t.step.train_s))),
    ("  beside decoding", _of(lambda t: share(t.decoding_share))),
    ("publication: waited", _of(lambda t: seconds(t.times.waited_s))),
    ("publication: took", _of(lambda t: seconds(t.times.took_s))),
    ("  trained meanwhile", _of(lambda t: seconds(t.times.trained_meanwhile_s))),
    ("published to replicas", _of(lambda t: str(sum(not p.error for p in t.publications)))),
]
