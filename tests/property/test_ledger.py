"""The bank's ledger of divergences against a dumb oracle: it walks from the newest version to its
parent, and so on, for each token anew."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.readybank.ledger import Ledger, divergence
from services.readybank.lineage import Lineage, Standing

steps = st.lists(
    st.tuples(st.integers(0, 3), st.one_of(st.none(), st.floats(-1e-3, 0.5)), st.booleans()),
    max_size=12,
)
"""Each: how many versions its parent lies back, what it moved, whether that is told late."""


def told(found: list[tuple[int, float | None, bool]]) -> tuple[Lineage, Ledger]:
    """Version n comes from n − 1, or from further back."""
    lineage = Lineage()
    ledger = Ledger(lineage)
    for number, (back, kl, late) in enumerate(found, start=1):
        parent = max(0, number - 1 - back)
        lineage.see(number, parent, published=False)
        ledger.see(number, None if late else kl)
        ledger.drift([(0, 1)])  # whatever is kept for quickness holds no longer with the next
        if late:
            ledger.see(number, kl)
        ledger.see(number, 99.0 if kl is not None else None)  # the first figure stands
    return lineage, ledger


def oracle(found: list[tuple[int, float | None, bool]], tokens: list[int]) -> tuple[float, int]:
    """The mean over the tokens' versions, and the steps that were not measured on the worst way."""
    total, missing = 0.0, 0
    for version in tokens:
        at, way, lacks = len(found), 0.0, 0
        while at != version:
            back, kl, _ = found[at - 1]
            way += 0.0 if kl is None else math.sqrt(max(0.0, kl))
            lacks += kl is None
            at = max(0, at - 1 - back)
        total, missing = total + way * way, max(missing, lacks)
    return (total / len(tokens) if tokens else 0.0), missing


@settings(max_examples=300, derandomize=True)
@given(steps, st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), max_size=6), st.data())
def test_a_bound_is_what_walking_the_lineage_for_each_token_gives(
    found: list[tuple[int, float | None, bool]], spans: list[tuple[int, int]], data: st.DataObject
) -> None:
    lineage, ledger = told(found)
    runs = [(v, n) for v, n in spans if lineage.standing(v) is Standing.KNOWN]
    tokens = [v for v, n in runs for _ in range(n)]
    kl, missing = oracle(found, tokens)
    drift = ledger.drift(runs)
    assert drift.kl == pytest.approx(kl)
    assert drift.missing == missing
    assert drift.bound == (None if missing else drift.kl)
    first = data.draw(st.integers(0, len(tokens) + 2))
    some = ledger.drift(runs, first)
    assert (some.kl, some.missing) == (
        pytest.approx(oracle(found, tokens[:first])[0]),
        oracle(found, tokens[:first])[1],
    )


@settings(max_examples=100, derandomize=True)
@given(steps, st.floats(0.0, 1.0))
def test_what_was_measured_goes_on_from_its_version(
    found: list[tuple[int, float | None, bool]], kl: float
) -> None:
    lineage, ledger = told(found)
    for version in lineage.line():
        way, missing = oracle(found, [version])
        onward = ledger.onward(version, kl)
        assert onward.kl == pytest.approx((math.sqrt(kl) + math.sqrt(way)) ** 2)
        assert onward.missing == missing


def test_equal_steps_in_one_direction_add_up_as_lengths() -> None:
    """Gaussians of one deviation: KL is half the squared distance of the means, so three steps of
    0.01 in one direction are 0.09, which is what the bound says."""
    _, ledger = told([(0, 0.01, False)] * 3)
    assert ledger.drift([(0, 5)]).bound == pytest.approx(0.09)
    assert ledger.drift([(0, 1), (3, 2)]).bound == pytest.approx(0.03)
    assert ledger.drift([]).bound == 0.0


def test_what_the_lineage_forgets_is_unknown_and_takes_no_memory() -> None:
    lineage, ledger = told([(0, 0.01, False)] * 50)
    lineage.forget(below=40)
    ledger.forget(below=40)
    assert ledger.drift([(40, 1)]).bound == pytest.approx(1.0)
    assert ledger.drift([(39, 1)]).bound is None
    assert len(ledger._moved) == 11


def test_the_divergence_is_that_of_the_policies_on_tokens_of_the_first() -> None:
    """Two tokens with chances 0.75 and 0.25, drawn in those shares: the mean is exact."""
    mu, pi = [math.log(0.75)] * 3 + [math.log(0.25)], [math.log(0.5)] * 4
    exact = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert divergence(mu, pi) == pytest.approx(exact)
    assert divergence(mu, mu) == 0.0
    assert divergence([], []) == 0.0
    assert math.isfinite(divergence([-1000.0], [0.0]))
