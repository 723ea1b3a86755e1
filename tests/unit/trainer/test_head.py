"""The head in pieces against one softmax over everything, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from services.trainer.adapters.torch_head import Allowed, HeadSettings, logprobs

ROWS, WIDTH, VOCABULARY = 7, 5, 29
EXACT = HeadSettings("float64", rows=3, columns=10)
NO_MASKS: Sequence[tuple[int, ...]] = [()] * ROWS


class Case:
    """Seeded hidden states, a head with a bias, targets and temperatures."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        torch.manual_seed(0)
        self.head = nn.Linear(WIDTH, VOCABULARY, dtype=dtype)
        self.hidden = torch.randn(ROWS, WIDTH, dtype=dtype, requires_grad=True)
        self.targets = torch.tensor([0, 9, 10, 28, 20, 3, 19])
        self.heat = torch.tensor([1.0, 0.6, 1.0, 0.7, 2.0, 1.0, 0.3], dtype=torch.float64)

    def found(
        self, masks: Sequence[tuple[int, ...]] = NO_MASKS, settings: HeadSettings = EXACT
    ) -> Tensor:
        allowed = Allowed.of(masks)
        return logprobs(self.hidden, self.head, self.targets, self.heat, allowed, settings)

    def wanted(self, masks: Sequence[tuple[int, ...]] = NO_MASKS) -> Tensor:
        logits = self.head.double()(self.hidden.double()) / self.heat[:, None]
        shut = torch.zeros_like(logits, dtype=torch.bool)
        for row, ids in enumerate(masks):
            if ids:
                shut[row] = True
                shut[row, list(ids)] = False
        table = logits.masked_fill(shut, -torch.inf).log_softmax(1)
        return table.gather(1, self.targets[:, None])[:, 0]


MASKS = [(), (9, 1, 28), (), (28,), (20, 21, 0, 5), (), (19, 18, 9, 10)]


@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("columns", [1, 10, 29, 1000])
@pytest.mark.parametrize("masks", [NO_MASKS, MASKS])
def test_pieces_add_up_to_the_whole(
    rows: int, columns: int, masks: Sequence[tuple[int, ...]]
) -> None:
    case = Case()
    found = case.found(masks, HeadSettings("float64", rows=rows, columns=columns))
    assert torch.allclose(found, case.wanted(masks), atol=1e-12, rtol=0)


def test_a_single_choice_is_certain() -> None:
    assert Case().found(MASKS)[3].item() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("masks", [NO_MASKS, MASKS])
def test_the_gradient_is_that_of_the_whole(masks: Sequence[tuple[int, ...]]) -> None:
    case = Case()
    inputs = [case.hidden, case.head.weight, case.head.bias]
    gains = torch.linspace(-1.0, 2.0, ROWS, dtype=torch.float64)
    found = torch.autograd.grad((case.found(masks) * gains).sum(), inputs)
    wanted = torch.autograd.grad((case.wanted(masks) * gains).sum(), inputs)
    for mine, reference in zip(found, wanted, strict=True):
        assert torch.allclose(mine, reference, atol=1e-12, rtol=0)


def test_bfloat16_weights_meet_in_float32() -> None:
    """The product of bfloat16 numbers is exact in float32; rounded to bfloat16 it is not."""
    case = Case(torch.bfloat16)
    wide = case.found(settings=HeadSettings("float32", rows=3, columns=10))
    narrow = case.found(settings=HeadSettings("bfloat16", rows=3, columns=10))
    wanted = case.wanted()
    assert (wide - wanted).abs().max() < 1e-6
    assert (narrow - wanted).abs().max() > 1e-4


def test_large_logits_do_not_overflow() -> None:
    case = Case()
    with torch.no_grad():
        case.head.weight.mul_(1e4)
    found = case.found()
    assert torch.isfinite(found).all()
    assert torch.allclose(found, case.wanted(), rtol=1e-9)
