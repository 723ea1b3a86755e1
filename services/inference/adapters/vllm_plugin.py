"""vLLM loads this in every one of its processes (entry point `vllm.general_plugins`).

Owns: the registration of the weight-transfer backend `muster`. Importing it costs nothing.
"""

from __future__ import annotations

BACKEND = "muster"


def register() -> None:
    """Make the backend known; safe to call more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    if BACKEND not in Factory._registry:
        module = "services.inference.adapters.vllm_receiver"
        Factory.register_engine(BACKEND, module, "MusterTransferEngine")
