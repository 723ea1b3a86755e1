"""What log-probabilities depend on besides the weights, and in what two engines differ.

Owns: `ServingFingerprint`, its wire form, the comparison. Promise: pure; fields that a newer
release adds as flags are compared by name. Does not cover: who fills it (the engines), where those
of a run are kept (served.py).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from muster.types import Value
from muster.v1 import inference_pb2 as pb

_NOT_TOLD = "not told"


class ServingFingerprint(Value, frozen=True, order=True):
    """Of one engine. Empty: not told; `quantization` empty: none."""

    engine: str = ""
    engine_version: str = ""
    dtype: str = ""  # of weights and hidden states
    quantization: str = ""
    attention_backend: str = ""
    device: str = ""
    head_dtype: str = ""  # in which the output head and the softmax are computed
    flags: tuple[str, ...] = ()  # what else was set, "name=value", sorted


def fingerprint_to_pb(value: ServingFingerprint) -> pb.ServingFingerprint:
    return pb.ServingFingerprint(
        engine=value.engine,
        engine_version=value.engine_version,
        dtype=value.dtype,
        quantization=value.quantization,
        attention_backend=value.attention_backend,
        device=value.device,
        head_dtype=value.head_dtype,
        flags=value.flags,
    )


def fingerprint_from_pb(message: pb.ServingFingerprint) -> ServingFingerprint:
    return ServingFingerprint(
        message.engine,
        message.engine_version,
        message.dtype,
        message.quantization,
        message.attention_backend,
        message.device,
        message.head_dtype,
        tuple(sorted(message.flags)),
    )


def differences(a: ServingFingerprint, b: ServingFingerprint) -> list[str]:
    """One line for each field or flag in which they differ, "field: of a, of b"; none when equal.

    What neither tells is no difference; what one alone tells is.
    """
    of_a, of_b = _fields(a), _fields(b)
    lines = []
    for name in (*of_a, *sorted(of_b.keys() - of_a.keys())):
        one, other = of_a.get(name, ""), of_b.get(name, "")
        if one != other:
            lines.append(f"{name}: {_said(name, one)}, {_said(name, other)}")
    return lines


def text(value: ServingFingerprint) -> str:
    """On one line, for people."""
    named = " ".join(f"{k}={v}" for k, v in _fields(value).items() if v and k not in _HEAD)
    head = " ".join(part for part in (value.engine, value.engine_version) if part)
    return f"{head} {named}".strip() or _NOT_TOLD


_HEAD = ("engine", "engine_version")


def _fields(value: ServingFingerprint) -> dict[str, str]:
    found: dict[str, str] = msgspec.structs.asdict(value)
    del found["flags"]
    return found | _flags(value.flags)


def _flags(flags: Iterable[str]) -> dict[str, str]:
    return {name: told for name, _, told in (flag.partition("=") for flag in flags)}


def _said(name: str, value: str) -> str:
    return value or ("none" if name == "quantization" else _NOT_TOLD)
