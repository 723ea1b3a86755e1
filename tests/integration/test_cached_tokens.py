"""The modelled KV cache finds what the real engine reports, request by request."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench.cached_tokens import compare, figures, real_engine

REQUESTS = 80


@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # vLLM and torch warn at import
async def test_cached_tokens_equal_the_engines(
    record_property: Callable[[str, object], None],
) -> None:
    async with real_engine() as engine:
        rows = await compare(engine, REQUESTS)

    found = figures(rows)
    record_property("figures", str(found))
    assert [(n, row) for n, row in enumerate(rows) if row.engine != row.model] == []
    assert found["evicting"] > 0
    assert found["evicting_partly"] > 0
