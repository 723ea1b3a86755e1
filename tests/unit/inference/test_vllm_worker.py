"""What the CPU worker tells Muster's receiver; vLLM's own loading is left out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM and torch warn at import


def test_the_receiver_sees_the_requests_that_the_worker_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.worker.cpu_worker import CPUWorker

    from services.inference.adapters import vllm_worker
    from services.inference.adapters.vllm_receiver import MusterTransferEngine

    monkeypatch.setattr(CPUWorker, "load_model", lambda self, **options: None)
    monkeypatch.setattr(vllm_worker, "use_float32_heads", lambda: None)
    monkeypatch.setattr(vllm_worker, "KeptTokens", lambda sampler: None)
    worker = vllm_worker.MusterCpuWorker.__new__(vllm_worker.MusterCpuWorker)
    worker.model_runner = SimpleNamespace(sampler=None, requests={})
    receiver = MusterTransferEngine.__new__(MusterTransferEngine)
    receiver.model = SimpleNamespace(modules=list)
    worker.weight_transfer_engine = receiver
    assert not receiver._at_rest(), "nobody has told yet"

    worker.load_model()

    assert receiver._at_rest()
    worker.model_runner.requests["one"] = object()
    assert not receiver._at_rest()
