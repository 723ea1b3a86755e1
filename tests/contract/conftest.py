"""One engine of each kind for all modules that ask it: vLLM takes a while to start."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.contract.engines import BENCHES, MOE_BENCHES, Bench


@pytest_asyncio.fixture(
    scope="package",
    loop_scope="package",
    params=["fake", pytest.param("vllm", marks=pytest.mark.engine)],
)
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    async with BENCHES[request.param]() as made:  # type: ignore[attr-defined]
        yield made


@pytest_asyncio.fixture(
    scope="package",
    loop_scope="package",
    params=["fake", pytest.param("vllm", marks=pytest.mark.engine)],
)
async def moe_bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Bench]:
    folder = tmp_path_factory.mktemp("moe")
    async with MOE_BENCHES[request.param](folder) as made:  # type: ignore[attr-defined]
        yield made
