"""`muster hosts --replicas`: what inference replicas tell of themselves."""

from __future__ import annotations

import io
from typing import Any

from muster import rpc
from muster.fingerprint import ServingFingerprint, fingerprint_to_pb
from muster.registry import Entry
from muster.replicas import ReplicaSeen, ask, seen, served_with, table
from muster.v1 import inference_pb2 as pb
from muster.v1 import inference_pb2_grpc
from muster.view import console

SERVING = ServingFingerprint(engine="vllm", engine_version="1.0", dtype="bfloat16")
TOLD = pb.GetReplicaStatusResponse(
    replica="inference-0",
    state=pb.REPLICA_STATE_SERVING,
    version=7,
    running=3,
    waiting=1,
    kv_tokens_used=640,
    kv_tokens_total=4096,
    tokens_generated=99,
    serving=fingerprint_to_pb(SERVING),
)
ENTRY = Entry("inference", "inference-0", "10.0.0.1:7")


class Replica(inference_pb2_grpc.InferenceServiceServicer):
    async def GetReplicaStatus(self, request: Any, context: Any) -> Any:
        return TOLD


def printed(*found: ReplicaSeen) -> list[str]:
    out = io.StringIO()
    console(out).print(table(found))
    return out.getvalue().splitlines()


def like(replica: str, **changed: str) -> ReplicaSeen:
    serving = {"engine": "vllm", "engine_version": "1.0", "dtype": "bfloat16"} | changed
    return ReplicaSeen(replica, "h:1", "serving", serving=ServingFingerprint(**serving))


def test_a_row_says_what_a_replica_serves_and_how_much() -> None:
    row = printed(seen(ENTRY, TOLD))[1].split()
    assert row == ["inference-0", "10.0.0.1:7", "serving", "7", "3", "1", "640/4096", "99"]


def test_what_most_serve_with_is_told_once_and_an_unlike_one_is_named() -> None:
    silent = ReplicaSeen("d", "h:1", problem="gone")
    assert served_with([like("a", dtype="float32"), like("b"), like("c"), silent]) == [
        "They serve with: vllm 1.0 dtype=bfloat16",
        "a differs: dtype: bfloat16, float32",
    ]
    assert served_with([silent]) == []


async def test_one_that_does_not_answer_says_so_in_its_row() -> None:
    add: Any = inference_pb2_grpc.add_InferenceServiceServicer_to_server
    async with rpc.serve("127.0.0.1:0", [(add, Replica())]) as server:
        here = Entry("inference", "inference-0", server.address)
        gone = Entry("inference", "inference-1", "127.0.0.1:1")
        found = await ask([here, gone])

    assert (found[0].version, found[0].serving) == (7, SERVING)
    assert "not asked:" in printed(*found)[2]
