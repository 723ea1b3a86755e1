"""The one-file page: complete, closed to the network, inert whatever a box has printed."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from muster.page import page
from muster.report import report
from muster.run_index import RunIndex
from muster.timeline import timelines
from muster.types import Outcome, OutcomeLabel
from muster.v1 import events_pb2 as ev
from tests.unit.report import chromium
from tests.unit.report.hostile import LEAKS, PAYLOADS, SECRETS

Story = Any


def rendered(story: Story, *, now: float = 100.0) -> str:
    record = story.record()
    drawn = timelines(RunIndex(record), now)
    found = report(record)
    return page(found, drawn, at_unix_s=0.0, secrets=["value-of-a-variable"])


class Seen(HTMLParser):
    """Elements with their attributes, and the texts of the data and the visible page."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._inside: list[str] = []
        self.data = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        inside = self._inside[-1] if self._inside else ""
        if inside == "script" and self.elements[-1][1].get("id") == "data":
            self.data += data
        elif inside not in ("script", "style"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


@pytest.fixture
def hostile(good: Story) -> Story:
    """Task names, commands, causes, details and hosts are payloads; a sibling still runs."""
    for number, payload in enumerate((*PAYLOADS, *LEAKS)):
        group = f"more-{number:05d}"
        opened = ev.GroupOpened(job="more", task=payload.encode("utf-8", "replace"), group_size=2)
        good.add("events", good._event(good._key(group, 0, 0), 0, group_opened=opened))
        word = payload.encode("utf-8", "replace").decode()
        good.step((group, 0, 0), 0, word, at=40)
        good.restored((group, 0, 0), host=word, at=43)
        good.end((group, 0, 0), 1, at=50)
        label = OutcomeLabel(Outcome.MODEL_FAILURE, word, 0.0, detail=word, replays=1)
        good.label((group, 0, 0), label)
        good.step((group, 1, 0), 0, word, at=40, finished=False)
    good.fate("more-00000", reason=PAYLOADS[0])
    return good


def test_figures_and_bottleneck_stand_in_the_page_itself(good: Story) -> None:
    text = Seen(rendered(good)).text
    for words in ("Run r", "Bottleneck:", "setting:", "time to trainable batch", "16.0 s cold"):
        assert words in text


def test_the_page_may_ask_for_nothing(good: Story) -> None:
    seen = Seen(rendered(good))
    [policy] = [a["content"] for tag, a in seen.elements if a.get("http-equiv")]
    assert policy
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    fetching = {"src", "href", "action", "data", "poster", "srcset", "background"}
    assert not [(tag, a) for tag, a in seen.elements if fetching & a.keys()]
    assert not [a for _, a in seen.elements if any(k.startswith("on") or k == "style" for k in a)]


def test_hostile_texts_add_no_element(hostile: Story) -> None:
    kinds = {tag for tag, _ in Seen(rendered(hostile)).elements}
    assert not kinds & {"img", "svg", "iframe", "link", "base", "a", "object", "form"}
    assert [tag for tag, _ in Seen(rendered(hostile)).elements].count("script") == 2


def test_no_escape_and_no_secret_reaches_the_page(hostile: Story) -> None:
    text = rendered(hostile)
    assert not re.search(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]", text
    )
    assert not [secret for secret in SECRETS if secret in text]


def test_the_script_never_turns_text_into_markup() -> None:
    script = (Path(__file__).parents[3] / "muster/assets/report.js").read_text()
    risky = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(|fetch|XMLHttp"
    )
    assert not re.search(risky, script)


def test_a_publication_has_a_color_that_no_state_has() -> None:
    script = (Path(__file__).parents[3] / "muster/assets/report.js").read_text()
    [states] = re.findall(r"const COLORS = \{(.*?)\};", script, re.DOTALL)
    [band] = re.findall(r'const BAND = "(#\w+)"', script)
    assert band not in states
    assert re.findall(r"fill: (BAND)\b", script) == ["BAND", "BAND"]  # in the legend, in the chart


def test_a_batch_is_drawn_with_the_sibling_that_blocks_it(good: Story) -> None:
    group = "job-00002"
    good.opened(group, size=2)
    good.episode(group, 0, at=40, version=2)
    good.episode(group, 1, at=40, turns=6, version=2)
    good.train(3, {group: [0, 0]}, asked=39, complete=53)
    data = json.loads(Seen(rendered(good)).data)
    newest = data["timelines"][0]
    assert newest["title"] == "batch 3 (trained)"
    assert [s["blocking"] for s in newest["strips"]] == [False, True]
    assert newest["strips"][0]["stretches"][:3] == [
        ["queue", 0.0, 1.0],
        ["decode", 1.0, 2.0],
        ["tool", 2.0, 3.0],
    ]
    assert dict(newest["lines"]) == {"asked": 0.0, "complete": 14.0}


def test_a_running_step_of_an_open_group_is_drawn_up_to_now(story: Story) -> None:
    story.job(groups=1)
    story.opened("job-00000", size=1)
    story.step(("job-00000", 0, 0), 0, "sleep 600", at=10, finished=False)
    [opened] = json.loads(Seen(rendered(story, now=70.0)).data)["timelines"]
    [strip] = opened["strips"]
    assert strip["stretches"][-1][0] == "tool"
    assert opened["start_unix_s"] + strip["stretches"][-1][2] == 70.0
    assert any("running, limit 60 s: sleep 600" in line for line in strip["details"])


def test_repairs_replays_and_publications_are_marked(story: Story) -> None:
    lost = OutcomeLabel(Outcome.INFRA_FAILURE, "host_lost")
    story.version(0, -1)
    story.job(groups=1)
    story.opened("job-00000", size=1)
    story.episode("job-00000", 0, 0, label=lost, at=10)
    story.step(("job-00000", 0, 1), 0, at=16)
    story.restored(("job-00000", 0, 1), at=19)
    story.end(("job-00000", 0, 1), 1, at=30)
    story.label(("job-00000", 0, 1))
    story.batch(1, {"job-00000": [1]}, asked=5, complete=31)
    published = ev.PolicyVersionRecord(
        version=1,
        digest="d",
        stage=ev.VERSION_STAGE_PUBLISHED,
        at_unix_s=20,
        publications=[ev.PublicationReport(replica="e0", latency_s=3)],
    )
    story.add("versions", published)
    one = json.loads(Seen(rendered(story)).data)["timelines"][0]
    assert [(m["kind"], m["at_s"]) for m in one["strips"][0]["marks"]] == [
        ("repair", 10.0),
        ("replay", 14.0),
    ]
    assert [(b["start_s"], b["end_s"]) for b in one["bands"]] == [(12.0, 15.0)]


def test_thousands_of_lanes_are_cut_to_whole_groups_and_the_rest_is_said(story: Story) -> None:
    story.job(groups=300, size=8)
    names = [f"job-{n:05d}" for n in range(300)]
    for n, name in enumerate(names):
        story.opened(name, size=8)
        for sibling in range(8):
            story.episode(name, sibling, turns=3, at=10 + n)
    story.batch(1, {name: [0] * 8 for name in names}, complete=400)
    text = rendered(story)
    [one] = json.loads(Seen(text).data)["timelines"]
    assert (len(one["strips"]), one["lanes_total"]) == (512, 2400)
    assert one["strips"][0]["group"] == names[-1]  # what ended last is what blocked
    assert len(text) < 2 << 20


needs_chromium = pytest.mark.skipif(
    chromium.path() is None, reason="no Chromium here (apt-get install chromium)"
)


@pytest.fixture
def opened(hostile: Story, tmp_path: Path) -> tuple[Path, Path]:
    file = tmp_path / "report.html"
    file.write_text(rendered(hostile), "utf-8")
    return file, tmp_path / "profile"


@needs_chromium
def test_in_a_browser_lanes_show_and_nothing_runs_or_is_fetched(opened: tuple[Path, Path]) -> None:
    file, profile = opened
    with chromium.Chromium(profile) as browser:
        browser.open(file)
        options = browser.value("document.querySelectorAll('#choice option').length")
        for at in reversed(range(options)):
            browser.value(
                f"(() => {{ const c = document.getElementById('choice'); c.value = '{at}';"
                "c.dispatchEvent(new Event('change'));"
                "for (const g of document.querySelectorAll('.lane')) {"
                "g.dispatchEvent(new MouseEvent('click', {bubbles: true}));"
                "for (const p of g.querySelectorAll('.piece, .repair, .replay'))"
                "p.dispatchEvent(new MouseEvent('mousemove', {bubbles: true})); } })()"
            )
            assert browser.value("document.querySelectorAll('.lane .piece').length") > 0
        assert "running, limit 60 s" in browser.value(
            "(() => { [...document.querySelectorAll('.lane')].pop().dispatchEvent("
            "new MouseEvent('click')); return document.getElementById('details').textContent })()"
        )
        assert browser.value("typeof window.harmed") == "undefined"
        requested = {r["request"]["url"] for r in browser.told("Network.requestWillBeSent")}
        assert requested == {file.as_uri()}
        assert browser.told("Page.javascriptDialogOpening") == []
        assert browser.told("Runtime.exceptionThrown") == []
        assert [e for e in browser.told("Log.entryAdded") if e["entry"]["level"] == "error"] == []


@needs_chromium
def test_in_a_browser_no_label_of_the_axis_is_clipped(opened: tuple[Path, Path]) -> None:
    file, profile = opened
    with chromium.Chromium(profile) as browser:
        browser.open(file)
        clipped = browser.value(
            "(() => { const s = document.querySelector('.chart > svg'), w = s.width.baseVal.value;"
            "return [...s.querySelectorAll('text.dim')].filter((t) => {"
            "const b = t.getBBox(); return b.x + b.width > w; }).length })()"
        )
        ticks = "document.querySelectorAll('.chart text.dim').length"
        assert browser.value(ticks) > 2
        assert clipped == 0


@needs_chromium
def test_a_script_that_was_smuggled_in_would_be_refused(opened: tuple[Path, Path]) -> None:
    """The control: were an escape forgotten, the page's policy still stands in the way."""
    file, profile = opened
    harmed = file.read_text("utf-8").replace("<h1>", "<script>window.harmed = 1</script><h1>")
    file.write_text(harmed, "utf-8")
    with chromium.Chromium(profile) as browser:
        browser.open(file)
        assert browser.value("typeof window.harmed") == "undefined"
        assert [e for e in browser.told("Log.entryAdded") if e["entry"]["level"] == "error"]


@needs_chromium
def test_without_javascript_the_figures_are_there(opened: tuple[Path, Path]) -> None:
    file, profile = opened
    with chromium.Chromium(profile) as browser:
        browser.open(file, scripts=False)
        browser.call("DOM.enable")
        node = browser.call("DOM.getDocument", depth=0)["root"]["nodeId"]
        text = browser.call("DOM.getOuterHTML", nodeId=node)["outerHTML"]
    assert "time to trainable batch" in text
    assert "the figures below are complete without it" in text
