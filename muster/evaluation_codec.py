"""What a router answers of an evaluation, as carriers.

Owns: that mapping. Promise: a replica that tells no fingerprint has None. Does not cover: the calls
(client.py), figures (evaluation.py).
"""

from __future__ import annotations

from muster import codec
from muster.evaluation import Asked, Serving, Training
from muster.fingerprint import fingerprint_from_pb
from muster.v1 import router_pb2 as pb

STATES = {
    pb.JOB_STATE_RUNNING: "running",
    pb.JOB_STATE_DONE: "done",
    pb.JOB_STATE_CANCELLED: "cancelled",
}


def asked_from_pb(message: pb.EvaluationHeader) -> Asked:
    return Asked(
        message.run,
        message.job,
        STATES[message.state],
        codec.sampling_from_pb(message.sampling),
        message.groups,
        message.group_size,
        message.submitted_unix_s,
    )


def serving_from_pb(message: pb.EvaluationHeader) -> tuple[Serving, ...]:
    return tuple(
        Serving(
            one.replica,
            fingerprint_from_pb(one.serving) if one.HasField("serving") else None,
            one.fingerprint,
        )
        for one in message.serving
    )


def training_from_pb(message: pb.EvaluationHeader) -> Training:
    known = message.HasField("training_sampling")
    return Training(
        message.training_job,
        codec.sampling_from_pb(message.training_sampling) if known else None,
        tuple(map(fingerprint_from_pb, message.run_served_by)),
    )
