"""The engine's labels on sampled tokens, turned into version spans.

Promise: pure; spans cover the sampled tokens without a gap, or it is an error: a token whose
version is not known is never handed on as if it were.
"""

from __future__ import annotations

from collections.abc import Iterable

from muster.errors import Unavailable
from muster.types import VersionSpan


def spans_from_labels(labels: Iterable[tuple[str, int, int]]) -> tuple[VersionSpan, ...]:
    """labels: (label, start, end) in order. KV is cleared at each commit, so it is never older."""
    spans: list[VersionSpan] = []
    for label, start, end in labels:
        if start == end:
            continue
        if start != (spans[-1].end if spans else 0) or end < start or not _is_version(label):
            raise Unavailable(
                f"the engine labelled tokens [{start}, {end}) as {label!r}",
                field="weight_versions",
                value=label,
                way_out="restart this replica: its versions cannot be trusted",
            )
        spans.append(VersionSpan(int(label), start, end, int(label)))
    return tuple(spans)


def _is_version(label: str) -> bool:
    return label.isascii() and label.isdigit()
