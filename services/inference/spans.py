"""The engine's labels on sampled tokens, turned into version spans.

Promise: pure; spans cover the sampled tokens without a gap, or it is an error: a token whose
version is not known is never handed on as if it were.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from muster.errors import Unavailable
from muster.types import VersionSpan


def spans_from_labels(
    labels: Iterable[tuple[str, int, int]], floors: Mapping[int, int] | None = None
) -> tuple[VersionSpan, ...]:
    """labels: (label, start, end) in order. floors: the oldest version in the KV under each; where
    nothing is said the KV is of the version itself."""
    known = floors or {}
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
        version = int(label)
        spans.append(VersionSpan(version, start, end, known.get(version, version)))
    return tuple(spans)


def _is_version(label: str) -> bool:
    return label.isascii() and label.isdigit()
