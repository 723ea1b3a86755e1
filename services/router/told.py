"""What an engine chose on the way to a reply, laid over the segments of its turn.

Owns: `Told`, and which rows of a routing belong to which segment. Promise: pure; a row goes to the
token that it is of, a token without one is UNRECORDED. Does not cover: the wire
(adapters/replies.py), the tokens (conversation.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from muster.segment_codec import UNRECORDED
from muster.types import RoutedExperts, SamplingMask, Segment, Value


class Told(Value, frozen=True):
    """mask: of every sampled token. experts: of the tokens of the context from `experts_from` on,
    and of all sampled ones."""

    mask: SamplingMask | None = None
    experts: RoutedExperts | None = None
    experts_from: int = 0


NOTHING = Told()


def routed(segments: Sequence[Segment], start: int, told: Told) -> list[Segment]:
    """The segments, the first of which begins at token `start` of the context, with their rows."""
    experts, found = told.experts, []
    for segment in segments:
        end = start + len(segment.token_ids)
        rows = None if experts is None else _rows(experts, start, end, told.experts_from)
        found.append(segment if rows is None else replace(segment, experts=rows))
        start = end
    return found


def routing_bytes(segments: Sequence[Segment]) -> int:
    """What the routing of these segments takes."""
    return sum(len(segment.experts.ids) for segment in segments if segment.experts is not None)


def _rows(experts: RoutedExperts, start: int, end: int, first: int) -> RoutedExperts | None:
    """Rows of the tokens [start, end); None when not one of them is known."""
    row = 2 * experts.layers * experts.per_token
    low = min(max(start, first), end)
    known = experts.ids[(low - first) * row : max(0, end - first) * row]
    if not known:
        return None
    return RoutedExperts(
        experts.layers,
        experts.per_token,
        b"".join((_unknown(experts, low - start), known, _unknown(experts, end - low, known))),
    )


def _unknown(experts: RoutedExperts, tokens: int, known: bytes = b"") -> bytes:
    """So many tokens' rows, less those that are known."""
    return UNRECORDED * (tokens * experts.layers * experts.per_token - len(known) // 2)
