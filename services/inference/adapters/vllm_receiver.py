"""The weight receiver that runs inside a vLLM worker, as weight-transfer backend `muster`.

Owns: receiving a version into staging memory in a thread of its own while the engine decodes,
verifying it, and putting it in place. vLLM's verbs map so:

    init_weight_transfer_engine      start receiving (returns at once: verbs run in the step loop)
    muster_update_status             phase, version, error (worker extension; gives an answer)
    start_weight_update              refuse unless that version is staged and verified
    update_weights                   put it in place (the engine is paused)
    finish_weight_update             done: free the staging memory
    shutdown_weight_transfer_engine  drop what was staged

Promise: nothing of the served model changes before update_weights; digests are checked before
STAGED (finite values before they are sent). Does not cover: pausing, labels, the KV (vllm.py);
tensor parallel workers.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.platforms import current_platform

from muster.transfer import manifest as weights
from muster.transfer.arriving import Source, arrive
from muster.transfer.group import GroupSpec
from muster.transfer.receiving import Staging
from muster.transfer.stored import StoredSpec
from services.inference.adapters.vllm_shadow import Shadow

_NICE = 3


@dataclass
class PrepareInfo(WeightTransferInitInfo):  # type: ignore[misc] # vLLM is untyped here
    """Manifest, and group or stored folder, as msgspec JSON; the other one is empty."""

    manifest: str
    group: str = ""
    stored: str = ""
    stored_root: str = ""


@dataclass
class ApplyInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which version to put in place."""

    version: int


class Receipt:
    """One version on its way in; written by its thread, read by the step loop."""

    def __init__(self, manifest: weights.Manifest):
        self.manifest = manifest
        self.phase = "receiving"
        self.error = ""
        self.receive_s = 0.0
        self.stage_s = 0.0
        self.tensors: dict[str, torch.Tensor] = {}
        self.stream: torch.Tensor | None = None  # what they are views of
        self.shadow: Shadow | None = None

    def status(self) -> dict[str, Any]:
        """What muster_update_status answers."""
        return {
            "phase": self.phase,
            "version": self.manifest.version,
            "error": self.error,
            "receive_s": self.receive_s,
            "stage_s": self.stage_s,
        }


class MusterTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """See the module's table of verbs."""

    init_info_cls = PrepareInfo
    update_info_cls = ApplyInfo
    supports_draft_weight_update = False
    receipt: Receipt | None = None
    staging: Staging | None = None

    def _staging_for(self, source: Source) -> Staging:
        if self.staging is None:
            direct = isinstance(source, GroupSpec) and source.backend == "nccl"
            self.staging = Staging(self.device if direct else "cpu")
        return self.staging

    def init_transfer_engine(self, init_info: PrepareInfo) -> None:
        if self.receipt is not None and self.receipt.phase == "receiving":
            raise RuntimeError("an update is already arriving; abort it first")
        manifest = msgspec.json.decode(init_info.manifest, type=weights.Manifest)
        source: Source
        if init_info.stored:
            source = msgspec.json.decode(init_info.stored, type=StoredSpec)
        else:
            source = msgspec.json.decode(init_info.group, type=GroupSpec)
        self.receipt = Receipt(manifest)
        # A daemon: a receiver that hangs in its transport must not hold up the worker's exit.
        threading.Thread(
            target=self._receive,
            args=(self.receipt, source, init_info.stored_root),
            name=f"receive-{manifest.version}",
            daemon=True,
        ).start()

    def _receive(self, receipt: Receipt, source: Source, stored_root: str) -> None:
        try:
            # Decoding has the first claim on the cores: this thread, and those it starts, yield.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
            began = time.monotonic()
            staging = self._staging_for(source)
            stream = arrive(receipt.manifest, source, staging, stored_root)
            receipt.receive_s = time.monotonic() - began
            tensors = weights.unpack(stream, receipt.manifest)
            if current_platform.is_cpu():
                with set_current_vllm_config(self.vllm_config):
                    receipt.shadow = Shadow(self.model, tensors)
                del tensors
                staging.give_back(stream)  # the shadow has copies
            else:
                receipt.tensors, receipt.stream = tensors, stream
            receipt.stage_s = time.monotonic() - began - receipt.receive_s
            receipt.phase = "staged"
        except Exception as error:  # noqa: BLE001 - vLLM's loaders may raise anything; told below
            # A thread that died in phase "receiving" would be waited for to the whole deadline.
            receipt.error = f"{type(error).__name__}: {error}"
            receipt.phase = "failed"

    def start_weight_update(self) -> None:
        if self.receipt is None or self.receipt.phase != "staged":
            raise RuntimeError("no version is staged")
        if self.receipt.shadow is None:
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if not current_platform.is_cpu():  # a CPU engine has no accelerator to wait for
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ApplyInfo) -> None:
        receipt = self.receipt
        if receipt is None or receipt.manifest.version != update_info.version:
            raise RuntimeError(f"version {update_info.version} is not the one staged")
        if receipt.shadow is not None:
            receipt.shadow.swap_in()
        else:
            self.model.load_weights(list(receipt.tensors.items()))

    def finish_weight_update(self) -> None:
        if self.receipt is not None and self.receipt.shadow is None:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)
            if self.staging is not None and self.receipt.stream is not None:
                self.staging.give_back(self.receipt.stream)
        self.receipt = None

    def shutdown(self) -> None:
        """Forget the receipt; its thread, if any, ends by its own time limit and keeps nothing."""
        self.receipt = None


class MusterWorkerExtension:
    """Mixed into vLLM's worker: the verbs that give an answer."""

    weight_transfer_engine: Any
    model_runner: Any

    def muster_update_status(self) -> dict[str, Any] | None:
        """The receipt's status, or None when nothing is in hand."""
        receipt = self.weight_transfer_engine.receipt
        return receipt.status() if receipt is not None else None

    def muster_attention_backend(self) -> str:
        """Name of the kernels that compute attention; empty when the runner does not tell."""
        groups = [one for some in getattr(self.model_runner, "attn_groups", ()) for one in some]
        return "+".join(sorted({group.backend.get_name() for group in groups}))
