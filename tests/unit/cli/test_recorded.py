"""The output of a recorded step is unpacked within its bound, or refused by name."""

from __future__ import annotations

import pytest
import zstandard

from muster.cli.recorded import OUTPUT_BYTES_MAX, output
from muster.errors import Refused

PACK = zstandard.ZstdCompressor().compress


def test_an_output_comes_back_with_its_broken_characters_replaced() -> None:
    assert output("o:e.0.0.1", PACK(b"alpha \xff\n")) == "alpha \ufffd\n"


@pytest.mark.parametrize(
    ("packed", "problem"),
    [(b"junk", "cannot be read"), (PACK(bytes(OUTPUT_BYTES_MAX + 1)), "too large")],
)
def test_what_is_no_output_is_refused_by_name(packed: bytes, problem: str) -> None:
    with pytest.raises(Refused, match=problem) as caught:
        output("o:e.0.0.1", packed)
    assert caught.value.value == "o:e.0.0.1"
