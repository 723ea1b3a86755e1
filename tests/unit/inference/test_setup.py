"""The environment that vLLM's processes get."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from services.inference.adapters import vllm_setup
from services.inference.config import InferenceConfig


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_a_cpu_engine_needs_no_compiler() -> None:
    os.environ.pop("TORCHDYNAMO_DISABLE", None)
    vllm_setup.set_environment(InferenceConfig(), cpu=True)

    assert os.environ["TORCHDYNAMO_DISABLE"] == "1"


def test_a_gpu_engine_compiles_as_it_likes() -> None:
    os.environ.pop("TORCHDYNAMO_DISABLE", None)
    vllm_setup.set_environment(InferenceConfig(), cpu=False)

    assert "TORCHDYNAMO_DISABLE" not in os.environ
