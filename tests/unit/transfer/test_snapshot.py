"""A version as it was: copied once, never changed, refused when no engine could take it."""

from __future__ import annotations

import pytest
import torch

from muster.errors import InvalidInput
from muster.transfer import manifest as weights
from muster.transfer.snapshot import Snapshot


def state() -> dict[str, torch.Tensor]:
    return {
        "embed": torch.arange(15, dtype=torch.bfloat16).reshape(5, 3),
        "scale": torch.tensor(2.5),
        "norm": torch.ones(7, dtype=torch.float16),
    }


def test_it_holds_every_tensor_as_it_was() -> None:
    found = Snapshot.take(state(), version=3, parent=2).tensors()

    assert list(found) == sorted(state())
    for name, tensor in state().items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_equal_weights_have_one_digest_in_whatever_order_they_come() -> None:
    turned = dict(reversed(state().items()))
    made = Snapshot.take(state(), version=3, parent=2).manifest
    assert Snapshot.take(turned, version=3, parent=2).manifest == made


def test_training_on_does_not_change_it() -> None:
    live = state()
    made = Snapshot.take(live, version=3, parent=2)
    live["embed"].add_(1)

    assert torch.equal(made.tensors()["embed"], state()["embed"])
    assert weights.wrong_bytes(weights.raw(made.tensors()["embed"]), made.manifest.tensors[0]) == ""


def test_its_manifest_is_that_of_the_state() -> None:
    expected = weights.build(state(), version=3, parent=2)
    assert Snapshot.take(state(), version=3, parent=2).manifest == expected


def test_another_number_leaves_the_digest_as_it_is() -> None:
    made = Snapshot.take(state(), version=3, parent=2)
    again = made.renamed(9, 3)

    assert (again.manifest.version, again.manifest.parent) == (9, 3)
    assert again.manifest.digest == made.manifest.digest


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_never_leave(value: float) -> None:
    bad = state() | {"norm": torch.tensor([value] * 7, dtype=torch.float16)}

    with pytest.raises(InvalidInput, match="not finite") as refused:
        Snapshot.take(bad, version=3, parent=2)
    assert refused.value.field == "norm"


def test_finite_values_with_a_sum_that_overflows_are_taken() -> None:
    large = {"norm": torch.full((70_000,), 3e38, dtype=torch.bfloat16)}
    Snapshot.take(large, version=1, parent=0)


def test_nothing_is_no_version() -> None:
    with pytest.raises(InvalidInput, match="names no tensor"):
        Snapshot.take({}, version=1, parent=0)
