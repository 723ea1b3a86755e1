"""Logs and traces: one line per record, control characters inert, identity carried on."""

from __future__ import annotations

import json
import logging
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.propagate import inject
from opentelemetry.sdk.trace import TracerProvider

from muster.telemetry import JsonFormatter, printable, span, traceparent


@given(st.text())
def test_printable_text_holds_no_control_character(text: str) -> None:
    shown = printable(text)
    assert not {c for c in shown if c not in "\n\t" and (ord(c) < 32 or 127 <= ord(c) < 160)}


HARMLESS = st.characters(
    exclude_categories=["Cc", "Cf", "Cn", "Cs", "Zl", "Zp"],
    exclude_characters="\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0",
)


@given(st.text(HARMLESS))
def test_printable_leaves_harmless_text_alone(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [("\x1b[2J", "\\x1b[2J"), ("\x9b", "\\x9b"), ("a\x7f\x00", "a\\x7f\\x00"), ("\r\n", "\\x0d\n")],
)
def test_printable_shows_what_it_took_away(text: str, shown: str) -> None:
    assert printable(text) == shown


def record(text: str, **extra: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"name": "muster.x", "levelname": "INFO", "msg": text})
    made.__dict__.update(extra)
    return made


@given(st.text() | st.text("\x7f\x1b\x9b"))
def test_a_log_record_is_one_line_of_ascii_json(text: str) -> None:
    line = JsonFormatter("router").format(record(text, episode=text))
    assert line.isascii()
    assert "\n" not in line
    assert not {c for c in line if ord(c) < 32 or ord(c) == 127}
    data = json.loads(line)
    assert (data["text"], data["episode"], data["service"]) == (text, text, "router")


def test_a_log_record_keeps_its_traceback_on_the_line() -> None:
    try:
        raise ValueError("boom")
    except ValueError:
        made = record("failed", exc_info=sys.exc_info())
    line = JsonFormatter("x").format(made)
    assert "\n" not in line
    assert "ValueError: boom" in json.loads(line)["traceback"]


def test_there_is_no_traceparent_outside_of_a_span() -> None:
    assert traceparent() == ""


def test_a_span_continues_the_callers_trace_and_links_its_sources() -> None:
    provider = TracerProvider()
    tracer = provider.get_tracer("test")
    with tracer.start_as_current_span("caller"):
        caller = traceparent()
    source = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    with span("callee", parent=caller, links=[source, ""]) as inner:
        context = inner.get_span_context()
    assert caller.split("-")[1] == f"{context.trace_id:032x}"
    assert trace.get_current_span().get_span_context().is_valid is False


def test_a_traceparent_is_what_the_standard_propagator_writes() -> None:
    written: dict[str, str] = {}
    with TracerProvider().get_tracer("test").start_as_current_span("one"):
        inject(written)
        assert traceparent() == written["traceparent"]


def test_a_span_ends_with_its_block_also_when_that_fails() -> None:
    with pytest.raises(ValueError, match="boom"), span("fails") as inner:
        raise ValueError("boom")
    assert not inner.is_recording()
    assert traceparent() == ""
