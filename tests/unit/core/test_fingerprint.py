"""In what two engines differ that serve the same weights."""

from __future__ import annotations

import msgspec
import pytest

from muster.fingerprint import (
    ServingFingerprint,
    differences,
    fingerprint_from_pb,
    fingerprint_to_pb,
    text,
)
from muster.v1 import inference_pb2 as pb

TRAINING = ServingFingerprint(
    engine="vllm",
    engine_version="0.32.0",
    dtype="bfloat16",
    attention_backend="CPU_ATTN",
    device="cpu",
    head_dtype="float32",
    flags=("block_size=32", "enforce_eager=True"),
)


def test_an_engine_does_not_differ_from_itself() -> None:
    assert differences(TRAINING, TRAINING) == []


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"engine": "fake"}, "engine: vllm, fake"),
        ({"engine_version": "0.33.0"}, "engine_version: 0.32.0, 0.33.0"),
        ({"dtype": "float16"}, "dtype: bfloat16, float16"),
        ({"quantization": "fp8"}, "quantization: none, fp8"),
        ({"attention_backend": ""}, "attention_backend: CPU_ATTN, not told"),
        ({"device": "cuda"}, "device: cpu, cuda"),
        ({"head_dtype": "bfloat16"}, "head_dtype: float32, bfloat16"),
    ],
)
def test_each_field_is_compared(changed: dict[str, str], line: str) -> None:
    assert differences(TRAINING, msgspec.structs.replace(TRAINING, **changed)) == [line]


def test_flags_are_compared_by_name() -> None:
    other = msgspec.structs.replace(TRAINING, flags=("block_size=16", "chunked_prefill=True"))

    assert differences(TRAINING, other) == [
        "block_size: 32, 16",
        "enforce_eager: True, not told",
        "chunked_prefill: not told, True",
    ]


def test_it_travels_whole_and_the_order_of_flags_says_nothing() -> None:
    sent = fingerprint_to_pb(TRAINING)
    assert fingerprint_from_pb(sent) == TRAINING

    turned = pb.ServingFingerprint()
    turned.CopyFrom(sent)
    turned.flags[:] = reversed(sent.flags)
    assert differences(fingerprint_from_pb(turned), TRAINING) == []


def test_its_line_names_what_is_known() -> None:
    assert text(TRAINING) == (
        "vllm 0.32.0 dtype=bfloat16 attention_backend=CPU_ATTN device=cpu head_dtype=float32 "
        "block_size=32 enforce_eager=True"
    )
    assert text(ServingFingerprint()) == "not told"
