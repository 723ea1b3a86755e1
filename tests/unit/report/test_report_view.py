"""What a terminal shows: complete, within its width, and inert."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console, RenderableType

from muster.audit import audit
from muster.audit_view import FINDINGS_MAX, render_audit
from muster.figures import report_json
from muster.report import report
from muster.report_view import COLUMNS_MAX, render
from muster.types import Outcome, OutcomeLabel
from muster.v1 import events_pb2 as ev
from muster.view import console, safe

Story = Any
HOSTILE = "\x1b]0;pwn\x07\x1b[2J\x9b31m\x7f[bold]x[/bold]\r\nnext"


def shown(what: RenderableType, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(what)
    return out.getvalue()


def test_every_section_is_there(good: Story) -> None:
    text = shown(render(report(good.record())))
    for words in (
        "run r: 2 groups trained, 0 filtered, 0 open; 4 trajectories in 36.0 s",
        "batch 1",
        "batch 2",
        "time to trainable batch",
        "16.0 s cold",
        "straggler tail",
        "interval between batches",
        "model_success/passed",
        "lag mean / max",
        "mismatch max",
        "step KL",
        "published to replicas",
        "pass rate",
        "repairs",
    ):
        assert words in text
    last = text[text.index("bottleneck: ") :]
    assert "setting: " in last
    assert len(last.splitlines()) <= 2


@pytest.mark.parametrize("width", [80, 100])
def test_the_newest_batches_fit_the_terminal(good: Story, width: int) -> None:
    for step in range(3, 9):
        group = f"job-{step:05d}"
        good.group(group, version=2)
        good.train(step, {group: [0, 0]}, asked=40 * step, complete=40 * step + 9)
    text = shown(render(report(good.record())), width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "…" not in text
    assert f"{8 - COLUMNS_MAX} earlier batches not shown: --batch N or --json" in text
    assert all(f"batch {step}" in text for step in (6, 7, 8))


def test_publications_stand_by_replica(good: Story) -> None:
    good.group("job-00002", version=2)
    publications = [
        ev.PublicationReport(replica="e0", latency_s=2.25, pause_s=0.5, token_gap_s=0.75),
        ev.PublicationReport(replica="e1", error="gone"),
    ]
    good.train(3, {"job-00002": [0, 0]}, publications=publications)
    text = shown(render(report(good.record(), only=3)))
    cells = [" ".join(line.split()) for line in text.splitlines()]
    assert "published to replicas 1" in cells
    assert "e0: latency 2.25 s" in cells
    assert "e0: pause 0.50 s" in cells
    assert "e0: token gap 0.75 s" in cells
    assert "e1: latency failed" in cells
    assert "batch 3 was not published to e1: gone" in cells


def test_the_slowest_and_the_failed_are_named_as_replay_takes_them(good: Story) -> None:
    """The attempt that counts, not the one before; a repaired sibling took its attempts' time."""
    group = "job-00002"
    good.opened(group, size=5)
    lost = OutcomeLabel(Outcome.INFRA_FAILURE, "host_lost")
    good.episode(group, 0, label=lost, at=40)
    good.episode(group, 0, 1, at=50)
    for sibling in (1, 2, 3):
        good.episode(group, sibling, at=41 + sibling)
    good.episode(group, 4, label=lost, at=30)
    good.train(3, {group: [1, 0, 0, 0, 0]})
    text = " ".join(shown(render(report(good.record(), only=3)), 300).split())
    assert f"batch 3, slowest: {group}.0.1 (15.0 s, model_failure/not_passed), {group}.3.0" in text
    assert f"batch 3, failed too: {group}.4.0 (infra_failure/host_lost)" in text
    assert f"{group}.0.0" not in text
    assert "`muster replay` runs it again" in text


def test_a_word_of_the_table_is_explained_where_it_stands(good: Story) -> None:
    assert "cold: counted from the submission" in shown(render(report(good.record(), only=1)))
    assert "cold" not in shown(render(report(good.record(), only=2)))
    assert "KS: largest distance" in shown(render_audit(audit(good.record())))


def test_before_the_first_batch_no_time_is_made_up(story: Story) -> None:
    story.job(groups=1)
    story.opened("job-00000")
    story.episode("job-00000", 0)
    text = shown(render(report(story.record())), 200)
    assert "1 trajectories so far, no batch is complete yet" in text
    assert "0.00 s" not in text.splitlines()[0]


def test_text_from_boxes_reaches_the_terminal_inert(good: Story) -> None:
    good.job("more", groups=2, at=1)
    good.opened("more-00000", job="more")
    good.episode("more-00000", 0, label=OutcomeLabel(Outcome.MODEL_FAILURE, HOSTILE, 0.0))
    good.episode("more-00000", 1)
    good.train(3, {"more-00000": [0, 0]})
    good.opened("more-00001" + HOSTILE, job="more")
    good.fate("more-00001" + HOSTILE, reason=HOSTILE)
    good.fate(HOSTILE, 77)
    for text in (
        shown(render(report(good.record())), 300),
        shown(render_audit(audit(good.record()))),
    ):
        assert not {c for c in text if (ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160}
        assert "\\x1b" in text
        assert "[bold]" in text.replace("\n", "")


def test_an_open_run_says_where_to_look(story: Story) -> None:
    assert "`muster explain` says" in shown(render(report(story.record())))


def test_audit_of_a_good_run_ends_clean(good: Story) -> None:
    text = shown(render_audit(audit(good.record())))
    assert "siblings 4 = 4 trained + 0 filtered + 0 open; 0 repaired" in text
    assert text.splitlines()[-1].startswith("audit of run r: clean")


def test_audit_shows_problems_first_and_says_how_many_it_left_out(good: Story) -> None:
    good.job("more", groups=1)
    good.opened("more-00000", job="more")
    for number in range(FINDINGS_MAX + 3):
        good.fate(f"ghost-{number}", reason="x")
    lines = shown(render_audit(audit(good.record()))).splitlines()
    assert lines[0] == "problem group ghost-0: has a fate, but was never opened"
    assert "… and 3 more problems: --json lists all" in lines
    assert any(line.startswith("note group more-00000: open: siblings not") for line in lines)
    assert lines[-1] == f"audit of run r: {FINDINGS_MAX + 3} problems"


def test_long_text_is_cut_with_a_mark() -> None:
    assert safe("a" * 50, 10).plain == "a" * 9 + "…"
    assert safe("two\nlines\tand tab").plain == "two lines and tab"


def test_where_no_terminal_is_nothing_is_wrapped_or_cut(good: Story) -> None:
    """80 columns are a terminal's, not a pipe's."""
    good.job("more", groups=1)
    good.opened("more-00000", job="more")
    cause = "a_cause_that_is_told_at_length_" * 5
    good.episode("more-00000", 0, label=OutcomeLabel(Outcome.INFRA_FAILURE, cause))
    out = io.StringIO()
    console(out).print(render(report(good.record())))
    [line] = [line for line in out.getvalue().splitlines() if line.startswith("outcomes: ")]
    assert cause in line


def test_every_figure_stands_flat_in_the_json(good: Story) -> None:
    found = json.loads(report_json(report(good.record())))
    figures = found["figures"]
    assert figures["batch.2.time_to_trainable_batch_s"] == 7
    assert figures["batch.1.split.decode"] == 2
    assert figures["totals.groups_trained"] == 2
    assert figures["engine.e0.gpu_seconds_waiting_on_environments"] == 6
    assert figures["bias.cohorts.0.ks_duration"] == 0
    assert figures["batch.1.trained.step.loss"] == 0.5
    assert not [v for v in figures.values() if isinstance(v, dict | list | str)]


def test_repairs_replays_and_remarks_are_told(story: Story) -> None:
    lost = OutcomeLabel(Outcome.INFRA_FAILURE, "host_lost")
    story.job(groups=1)
    story.opened("job-00000")
    story.episode("job-00000", 0, 0, label=lost)
    story.episode("job-00000", 0, 1)
    story.step(("job-00000", 1, 0), 0)
    story.restored(("job-00000", 1, 0))
    story.end(("job-00000", 1, 0), 1)
    story.label(("job-00000", 1, 0))
    story.train(1, {"job-00000": [1, 0]})
    text = shown(render(report(story.record())), 200)
    for words in (
        "repairs / replays",
        "attempts repaired because: host_lost 1",
        "boxes rebuilt by replay 1 (host_lost 1), 1 turns run again",
        "prompts; waited for environments",
        "trained against dispatched, 1 settled cohorts: largest KS distance of durations 0",
        "remark: task t: 1 groups without variance",
    ):
        assert words in text


def test_the_audit_shows_the_cohorts(good: Story) -> None:
    text = shown(render_audit(audit(good.record())))
    assert "start             2     0  5.00 s → 5.00 s" in text
    assert "…" not in text
