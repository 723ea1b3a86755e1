"""Logs, traces and their identity across gRPC and streams.

Owns: JSON log lines on stderr, OpenTelemetry spans (JSON lines in the state folder), the
`traceparent` that gRPC metadata and stream entries carry. Promise: one record per line whatever
the text holds: control characters never reach a terminal, and secrets are masked
(clean.py). Metric names are in DESIGN §9.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from opentelemetry import trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from muster.clean import masked, printable
from muster.config import TelemetryConfig

__all__ = ["configure", "flush", "logger", "printable", "span", "traceparent"]

_encoder = msgspec.json.Encoder(enc_hook=str)  # a router ends some thousand spans a second
_W3C = TraceContextTextMapPropagator()
_STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object per record; extra fields stand beside the message."""

    def __init__(self, service: str):
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        data: dict[str, Any] = {
            "at": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "text": masked(record.getMessage()),
        }
        extra = {k: v for k, v in vars(record).items() if k not in _STANDARD}
        data |= {k: masked(v) if isinstance(v, str) else v for k, v in extra.items()}
        if record.exc_info:
            data["traceback"] = masked(self.formatException(record.exc_info))
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            data["trace"] = f"{context.trace_id:032x}"
        # JSON escapes every control character but DEL.
        return json.dumps(data, ensure_ascii=True, default=str).replace("\x7f", "\\u007f")


class _FileExporter(SpanExporter):
    """Spans as JSON lines; append only."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        for span in spans:
            context = span.get_span_context()
            parent = span.parent
            line = {
                "name": span.name,
                "trace": f"{context.trace_id:032x}" if context else "",
                "span": f"{context.span_id:016x}" if context else "",
                "parent": f"{parent.span_id:016x}" if parent else "",
                "links": [f"{link.context.trace_id:032x}" for link in span.links],
                "start_ns": span.start_time,
                "end_ns": span.end_time,
                "attributes": dict(span.attributes or {}),
            }
            self._file.write(_encoder.encode(line).decode() + "\n")
        self._file.flush()
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._file.close()


def configure(service: str, config: TelemetryConfig, state_dir: Path) -> None:
    """Set up logs and traces of this process; call once, first thing."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.log_level)
    if config.traces:
        provider = TracerProvider(resource=Resource.create({"service.name": f"muster-{service}"}))
        exporter = _FileExporter(state_dir / "traces" / f"{service}.jsonl")
        provider.add_span_processor(BatchSpanProcessor(exporter))
        trace.set_tracer_provider(provider)


def flush() -> None:
    """Write out finished spans; bounded."""
    provider = trace.get_tracer_provider()
    if isinstance(provider, TracerProvider):
        provider.force_flush(2000)


def logger(name: str) -> logging.Logger:
    """A logger; fields go in `extra={...}`."""
    return logging.getLogger(name)


class span:
    """A span around a block; what `with` gives is the span itself.

    parent: `traceparent` of the caller (gRPC); links: those of stream entries that led here
    (a batch fans in, so its sources are links and not parents). A class and not a generator: every
    command of a router runs in one.
    """

    __slots__ = ("_span", "_token")

    def __init__(
        self, name: str, *, parent: str = "", links: Sequence[str] = (), **attributes: Any
    ):
        context = _remote(parent) if parent else None
        found = [trace.get_current_span(_remote(v)) for v in links if v]
        linked = [trace.Link(s.get_span_context()) for s in found if s.get_span_context().is_valid]
        tracer = _tracer(trace.get_tracer_provider())
        self._span = tracer.start_span(name, context, links=linked, attributes=attributes)

    def __enter__(self) -> trace.Span:
        self._token = attach(trace.set_span_in_context(self._span))
        return self._span

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: object
    ) -> None:
        detach(self._token)
        if isinstance(error, Exception):
            self._span.record_exception(error)
            self._span.set_status(trace.StatusCode.ERROR, f"{type(error).__name__}: {error}")
        self._span.end()


@lru_cache(maxsize=4)
def _tracer(provider: trace.TracerProvider) -> trace.Tracer:
    return provider.get_tracer("muster")


@lru_cache(maxsize=4096)
def _remote(parent: str) -> Context:
    """The context of a caller: one for all that it leads to."""
    return _W3C.extract({"traceparent": parent}, Context())


def traceparent() -> str:
    """The current span as a W3C `traceparent`, empty outside of one."""
    found = trace.get_current_span().get_span_context()
    if not found.is_valid:
        return ""
    return f"00-{found.trace_id:032x}-{found.span_id:016x}-{found.trace_flags:02x}"
