"""Labels of the engine become spans, or nothing is handed on."""

from __future__ import annotations

import pytest

from muster.errors import Unavailable
from muster.types import VersionSpan
from services.inference.spans import spans_from_labels


def test_labels_become_spans() -> None:
    assert spans_from_labels([("0", 0, 5), ("12", 5, 9)]) == (
        VersionSpan(0, 0, 5, 0),
        VersionSpan(12, 5, 9, 12),
    )


def test_a_label_without_tokens_is_no_span() -> None:
    assert spans_from_labels([("0", 0, 0), ("1", 0, 3)]) == (VersionSpan(1, 0, 3, 1),)


@pytest.mark.parametrize(
    "labels",
    [
        [("default", 0, 5)],
        [("-1", 0, 5)],
        [("1", 1, 5)],
        [("0", 0, 5), ("1", 6, 9)],
        [("0", 0, 5), ("1", 4, 9)],
    ],
)
def test_a_token_of_unknown_version_is_an_error(labels: list[tuple[str, int, int]]) -> None:
    with pytest.raises(Unavailable, match="labelled"):
        spans_from_labels(labels)
