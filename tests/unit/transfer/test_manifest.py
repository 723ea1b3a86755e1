"""The manifest: what travels, and how a wrong thing is noticed."""

from __future__ import annotations

import itertools

import msgspec
import pytest
import torch

from muster.errors import InvalidInput
from muster.transfer import manifest as weights
from muster.transfer import wire
from muster.transfer.group import GroupSpec


def state() -> dict[str, torch.Tensor]:
    return {
        "embed": torch.arange(15, dtype=torch.bfloat16).reshape(5, 3),
        "scale": torch.tensor(2.5),
        "norm": torch.ones(7, dtype=torch.float16),
    }


def manifest() -> weights.Manifest:
    return weights.build(state(), version=3, parent=2)


def test_slots_are_aligned_and_do_not_overlap() -> None:
    slots, total = weights.layout(manifest().tensors)

    assert [slot.start % weights.ALIGN_BYTES for slot in slots] == [0, 0, 0]
    assert all(a.end <= b.start for a, b in itertools.pairwise(slots))
    assert total >= slots[-1].end


def test_buckets_cover_the_stream_without_a_gap() -> None:
    pieces = weights.buckets(100, 32)

    assert [(p.start, p.end) for p in pieces] == [(0, 32), (32, 64), (64, 96), (96, 100)]


def test_buckets_are_large_at_first_and_small_at_the_end() -> None:
    mib = 1 << 20
    pieces = weights.buckets(200 * mib + 7, 64 * mib)

    assert [(p.end - p.start) / mib for p in pieces[:-1]] == [64, 64, 36, 18, 9, 8]
    assert pieces[-1].end == 200 * mib + 7
    assert all(p.start % weights.ALIGN_BYTES == 0 for p in pieces)


def test_a_group_that_does_not_say_how_the_stream_is_cut_is_refused() -> None:
    message = wire.group_to_pb(GroupSpec("gloo", "10.0.0.1", 4711, 2, 3, "run/4/abc", 12.5))
    message.bucket_bytes = 0
    with pytest.raises(InvalidInput, match=r"bucket_bytes.*one version"):
        wire.group_from_pb(message)


def test_the_digest_names_the_weights_and_nothing_else() -> None:
    assert weights.build(state(), version=9, parent=8).digest == manifest().digest
    changed = state() | {"scale": torch.tensor(2.75)}
    assert weights.build(changed, version=3, parent=2).digest != manifest().digest
    renamed = {n.upper(): t for n, t in state().items()}
    assert weights.build(renamed, version=3, parent=2).digest != manifest().digest


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"digest": "0" * 64}, "manifest.digest"),
        ({"bytes_total": 1}, "manifest.bytes_total"),
        ({"tensors": ()}, "manifest.tensors"),
        ({"tensors": manifest().tensors * 2}, "manifest.tensors"),
        (
            {"tensors": (weights.TensorSpec("x", (1,), "complex256", ""),)},
            "x.dtype",
        ),
        ({"tensors": (weights.TensorSpec("x", (-1,), "int8", ""),)}, "x.shape"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    change: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        weights.checked(msgspec.structs.replace(manifest(), **change))

    assert refused.value.field == field


@pytest.mark.parametrize(
    ("expected", "problem"),
    [
        ({"embed": (5, 3), "scale": (), "norm": (7,), "head": (5, 3)}, "missing, first 'head'"),
        ({"embed": (5, 3), "scale": ()}, "not in the model, first 'norm'"),
        ({"embed": (5, 3), "scale": (), "norm": (8,)}, "not the model's shape"),
    ],
)
def test_half_a_model_is_refused(expected: dict[str, tuple[int, ...]], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        weights.check_complete(manifest(), expected)


def test_the_whole_model_is_accepted() -> None:
    weights.check_complete(manifest(), {"norm": (7,), "embed": (5, 3), "scale": ()})


def test_manifest_and_group_survive_the_wire() -> None:
    spec = GroupSpec("gloo", "10.0.0.1", 4711, 2, 3, "run/4/abc", 12.5, 4096)

    assert wire.manifest_from_pb(wire.manifest_to_pb(manifest())) == manifest()
    assert wire.group_from_pb(wire.group_to_pb(spec)) == spec


def test_the_wire_refuses_what_contradicts_itself() -> None:
    message = wire.manifest_to_pb(manifest())
    message.tensors[0].digest = "0" * 64

    with pytest.raises(InvalidInput, match="does not match the entries"):
        wire.manifest_from_pb(message)
