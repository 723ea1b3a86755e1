"""A Generate request as bytes: its context, packed before, is copied once and not once per layer.

Owns: `generate_request`. Promise: the bytes are a GenerateRequest with `prompt_token_ids` equal to
`context`, field by field what protobuf would send (fields of a message may come in any order).
A context of 32,000 tokens has 128 KB: set and serialized by protobuf it was 8 % of what a router
did (docs/results/router.md). Does not cover: the call (replicas.py).
"""

from __future__ import annotations

from muster.v1 import inference_pb2 as inf
from services.router.context import Parts

METHOD = "/muster.v1.InferenceService/Generate"
_LENGTH_DELIMITED = 2  # protobuf's wire type of bytes
_NUMBER = inf.GenerateRequest.PROMPT_TOKEN_IDS_FIELD_NUMBER
_TAG = bytes([_NUMBER << 3 | _LENGTH_DELIMITED])


def generate_request(rest: inf.GenerateRequest, context: Parts) -> bytes:
    """`rest`: everything but the prompt. `context`: together what codec.pack_ids makes."""
    size = sum(len(part) for part in context)
    return b"".join((rest.SerializeToString(), _TAG, _varint(size), *context))


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; the top bit says that more follow."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])
