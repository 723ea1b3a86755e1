"""The report as one HTML file that opens offline.

Owns: the page's structure, its content policy, cleaning and escaping of every text on it. Promise:
pure; the page asks the network for nothing (default-src 'none'; its one script and one style are
allowed by their hashes); text of tasks and boxes is cleaned (clean.py), escaped, and enters the
drawing as text nodes only; figures, totals and bottleneck show without JavaScript.
Does not cover: which lanes there are (timeline.py), the drawing (assets/report.js).
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

import msgspec

from muster.clean import clean
from muster.figures import RunReport
from muster.report_rows import (
    bottleneck_parts,
    failures,
    headline,
    legend,
    lines,
    named,
    rows,
)
from muster.timeline import Timeline

COLUMNS_MAX = 12
_TEXT_MAX = 500


def page(
    report: RunReport, timelines: Sequence[Timeline], *, at_unix_s: float, secrets: Sequence[str]
) -> str:
    """The whole file. secrets: values that are masked wherever they stand."""
    style, script = _asset("report.css"), _asset("report.js")
    what, setting = bottleneck_parts(report)
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )

    def text(value: str) -> str:
        return html.escape(clean(value, secrets, longest=_TEXT_MAX))

    at = datetime.fromtimestamp(at_unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    paragraphs = [f"<p>{text(line)}</p>" for line in lines(report)]
    remarks = [f"<li>{text(remark)}</li>" for remark in report.remarks]
    data = {"timelines": [msgspec.to_builtins(one) for one in timelines]}
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="referrer" content="no-referrer">',
            f"<title>Muster: run {text(report.run)}</title>",
            f"<style>{style}</style>",
            "</head>",
            "<body>",
            f"<h1>Run {text(report.run)}</h1>",
            f'<p>{text(headline(report))}</p><p class="dim">As of {at}.</p>',
            f'<p class="bottleneck">Bottleneck: <strong>{text(what)}</strong>; {text(setting)}</p>',
            "<h2>Timeline</h2>",
            '<div id="timeline"><p class="dim">The timeline is drawn by JavaScript, which is off '
            "or was refused; the figures below are complete without it.</p></div>",
            "<h2>Figures by batch</h2>",
            _figures(report, text),
            "<h2>The run</h2>",
            *paragraphs,
            *(["<h2>Remarks</h2>", "<ul>", *remarks, "</ul>"] if remarks else []),
            f'<script type="application/json" id="data">{_data(data, secrets)}</script>',
            f"<script>{script}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _figures(report: RunReport, text: Any) -> str:
    shown = report.batches[-COLUMNS_MAX:]
    if not shown:
        return "<p>No batch is complete yet.</p>"
    heads = [
        f'<th scope="col">batch {b.step}{"" if b.stage == "trained" else " *"}</th>' for b in shown
    ]
    body = []
    for label, cells in rows(shown):
        inner = ' class="in"' if label.startswith(" ") else ""
        values = "".join(f"<td>{text(cell)}</td>" for cell in cells)
        body.append(f"<tr><td{inner}>{text(label.strip())}</td>{values}</tr>")
    notes = [text(line) for line in (*legend(shown), *failures(shown), *named(shown))]
    if any(b.stage != "trained" for b in shown):
        notes.append("* leased, not yet acknowledged")
    if len(report.batches) > len(shown):
        notes.append(f"{len(report.batches) - len(shown)} earlier batches are not shown here")
    return "\n".join(
        [
            '<div class="table"><table>',
            f"<thead><tr><th></th>{''.join(heads)}</tr></thead>",
            "<tbody>",
            *body,
            "</tbody></table></div>",
            *[f'<p class="dim">{note}</p>' for note in notes],
        ]
    )


def _data(value: object, secrets: Sequence[str]) -> str:
    """JSON that cannot end its element: every string cleaned, no <, > or & in it."""
    known: dict[str, str] = {}  # names of states and tasks come by the thousand

    def cleaned(value: Any) -> Any:
        if isinstance(value, str):
            if value not in known:
                known[value] = clean(value, secrets, longest=_TEXT_MAX)
            return known[value]
        if isinstance(value, dict):
            return {key: cleaned(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [cleaned(inner) for inner in value]
        return value

    text = msgspec.json.encode(cleaned(value)).decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return (files("muster") / "assets" / name).read_text("utf-8")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"sha256-{digest}"
