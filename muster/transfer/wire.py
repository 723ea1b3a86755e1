"""Manifest and group to protobuf and back.

Promise: lossless; what comes in is checked (`manifest.checked`), so a servicer that decodes has a
consistent manifest. Does not cover: the rest of the wire (muster/codec.py).
"""

from __future__ import annotations

from muster.errors import InvalidInput
from muster.transfer.arriving import Source
from muster.transfer.group import GroupSpec
from muster.transfer.manifest import Manifest, TensorSpec, checked
from muster.transfer.stored import StoredSpec
from muster.v1 import events_pb2 as ev
from muster.v1 import inference_pb2 as pb


def manifest_to_pb(manifest: Manifest) -> pb.WeightManifest:
    return pb.WeightManifest(
        version=manifest.version,
        parent=manifest.parent,
        tensors=[
            pb.TensorEntry(name=s.name, shape=s.shape, dtype=s.dtype, digest=s.digest)
            for s in manifest.tensors
        ],
        digest=manifest.digest,
        bytes_total=manifest.bytes_total,
    )


def manifest_from_pb(message: pb.WeightManifest) -> Manifest:
    """Raises InvalidInput for a manifest that contradicts itself."""
    specs = tuple(TensorSpec(e.name, tuple(e.shape), e.dtype, e.digest) for e in message.tensors)
    return checked(
        Manifest(message.version, message.parent, specs, message.digest, message.bytes_total)
    )


def group_to_pb(spec: GroupSpec) -> pb.TransferGroup:
    return pb.TransferGroup(
        backend=spec.backend,
        host=spec.host,
        port=spec.port,
        rank=spec.rank,
        world_size=spec.world_size,
        generation=spec.generation,
        deadline_s=spec.timeout_s,
        bucket_bytes=spec.bucket_bytes,
    )


def group_from_pb(message: pb.TransferGroup) -> GroupSpec:
    """Raises InvalidInput for one that does not say how the stream is cut."""
    if message.bucket_bytes < 1:
        raise InvalidInput(
            "the stream is cut into pieces of nothing",
            field="group.bucket_bytes",
            value=message.bucket_bytes,
            way_out="trainer and replicas must be of one version of Muster",
        )
    return GroupSpec(
        message.backend,
        message.host,
        message.port,
        message.rank,
        message.world_size,
        message.generation,
        message.deadline_s,
        message.bucket_bytes,
    )


def stored_to_pb(spec: StoredSpec) -> pb.StoredWeights:
    return pb.StoredWeights(folder=spec.folder, deadline_s=spec.timeout_s)


def source_from_pb(request: pb.PrepareWeightUpdateRequest) -> Source:
    """Raises InvalidInput for a request that names none."""
    match request.WhichOneof("source"):
        case "group":
            return group_from_pb(request.group)
        case "stored":
            folder, limit_s = request.stored.folder, request.stored.deadline_s
            return StoredSpec(folder, limit_s, request.bytes_per_s)
    raise InvalidInput(
        "it says nowhere to take the weights from",
        field="source",
        value="",
        way_out="name a group or a stored version",
    )


def report_to_pb(report: object) -> ev.PublicationReport:
    """How a replica took a version, from a carrier that has the fields of the message."""
    names = [field.name for field in ev.PublicationReport.DESCRIPTOR.fields]
    return ev.PublicationReport(**{name: getattr(report, name) for name in names})
