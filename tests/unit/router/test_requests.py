"""The request that is put together by hand is the one that protobuf reads."""

from __future__ import annotations

import pytest

from muster import codec
from muster.types import EpisodeKey, SamplingParams
from muster.v1 import inference_pb2 as inf
from services.router.adapters.requests import METHOD, generate_request

REST = {
    "episode": codec.key_to_pb(EpisodeKey("r", "j-00000", 3, 1, 7)),
    "request_id": "j-00000.3.1.0.0",
    "sampling": codec.sampling_to_pb(SamplingParams()),
    "max_tokens": 64,
    "stop_token_ids": (2, 7),
}


@pytest.mark.parametrize("tokens", [0, 1, 31, 32, 4095, 4096, 600_000])
def test_it_reads_as_the_message_with_that_prompt(tokens: int) -> None:
    context = codec.pack_ids(range(tokens))
    wire = generate_request(inf.GenerateRequest(**REST), (context[:8], bytearray(context[8:])))
    asked = inf.GenerateRequest(prompt_token_ids=context, **REST)
    assert inf.GenerateRequest.FromString(wire) == asked


def test_it_goes_to_the_method_that_the_service_has() -> None:
    service = inf.DESCRIPTOR.services_by_name["InferenceService"]
    assert METHOD == f"/{service.full_name}/{service.methods_by_name['Generate'].name}"
