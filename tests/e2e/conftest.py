"""Room on the disk: a run on the real model leaves gigabytes of weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _weights_go(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Before the next module begins; logs, journals and records stay to be read."""
    yield
    for path in tmp_path_factory.getbasetemp().rglob("*.safetensors"):
        path.unlink()
