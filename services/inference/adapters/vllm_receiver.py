"""The weight receiver that runs inside a vLLM worker, as weight-transfer backend `muster`.

Owns: receiving a version into staging memory in a thread of its own while the engine decodes,
verifying it, and putting it in place. vLLM's verbs map so:

    init_weight_transfer_engine      start receiving (returns at once: verbs run in the step loop)
    muster_update_status             phase, version, error (worker extension; gives an answer)
    muster_pack                      the same, and packs what is not: the engine is at work
    start_weight_update              refuse unless that version is staged and verified
    update_weights                   put it in place (the engine is paused)
    finish_weight_update             done: free the staging memory
    shutdown_weight_transfer_engine  drop what was staged
    muster_drop_update               the same after an apply that failed half way

On a CPU a version is packed beside the one that serves (vllm_shadow.py), unless the engine has
nothing to do when it is here: then it is put in place layer by layer, in the memory of what it
replaces, which stops the engine for longer and takes less in all.
Promise: nothing of the served model changes before update_weights; digests are checked before
STAGED (finite values before they are sent). Does not cover: pausing, labels, the KV (vllm.py);
tensor parallel workers.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sized
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
from services.inference.adapters import vllm_reload
from services.inference.adapters.vllm_reload import Reload
from services.inference.adapters.vllm_shadow import Shadow

_NICE = 3
_PACKING = threading.Lock()
"""Held while a version is packed, also one that was dropped meanwhile: vLLM's current configuration
is one for the process, and is set while layers are processed."""


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
        self.packing: threading.Thread | None = None

    def status(self) -> dict[str, Any]:
        """What muster_update_status answers."""
        return {
            "phase": self.phase,
            "version": self.manifest.version,
            "error": self.error,
            "receive_s": self.receive_s,
            "stage_s": self.stage_s,
            "packed": self.shadow is not None or not current_platform.is_cpu(),
            "packing": self.packing is not None or _PACKING.locked(),
        }


class MusterTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """See the module's table of verbs."""

    init_info_cls = PrepareInfo
    update_info_cls = ApplyInfo
    supports_draft_weight_update = False
    receipt: Receipt | None = None
    staging: Staging | None = None
    running: Sized | None = None
    """The requests that the worker computes; None: nobody tells, so some may be."""
    reload: Reload | None = None

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
            receipt.tensors, receipt.stream = weights.unpack(stream, receipt.manifest), stream
            if current_platform.is_cpu() and not self._at_rest():
                self._pack(receipt)
            receipt.stage_s = time.monotonic() - began - receipt.receive_s
            receipt.phase = "staged"
        except Exception as error:  # noqa: BLE001 - vLLM's loaders may raise anything; told below
            # A thread that died in phase "receiving" would be waited for to the whole deadline.
            receipt.error = f"{type(error).__name__}: {error}"
            receipt.phase = "failed"

    def _at_rest(self) -> bool:
        """Nothing is computed, and vLLM loads this model again as it did at first."""
        return self.running is not None and not self.running and vllm_reload.possible(self.model)

    def _pack(self, receipt: Receipt) -> None:
        try:
            with _PACKING, set_current_vllm_config(self.vllm_config):
                receipt.shadow = Shadow(self.model, receipt.tensors)
        finally:
            self._used(receipt)  # the shadow has copies

    def _used(self, receipt: Receipt) -> None:
        """Nobody reads what arrived any more."""
        stream, receipt.tensors, receipt.stream = receipt.stream, {}, None
        if self.staging is not None and stream is not None:
            self.staging.give_back(stream)

    def pack(self) -> None:
        """Pack what is staged and is not, in a thread; does nothing the second time."""
        receipt = self.receipt
        if receipt is None or receipt.phase != "staged" or receipt.status()["packed"]:
            return
        if receipt.packing is None:
            name = f"pack-{receipt.manifest.version}"
            thread = threading.Thread(
                target=self._pack_late, args=(receipt,), name=name, daemon=True
            )
            try:
                thread.start()
                receipt.packing = thread
            except RuntimeError as error:  # no thread can be had
                receipt.error, receipt.phase = str(error), "failed"

    def _pack_late(self, receipt: Receipt) -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
            self._pack(receipt)
        except Exception as error:  # noqa: BLE001 - as in _receive
            receipt.error = f"{type(error).__name__}: {error}"
            receipt.phase = "failed"

    def start_weight_update(self) -> None:
        if self.receipt is None or self.receipt.phase != "staged":
            raise RuntimeError("no version is staged")
        if self.receipt.shadow is None:
            if self.receipt.status()["packing"]:
                raise RuntimeError("a version is still being packed")
            self.reload = Reload(self.model, self.model_config)
            self.reload.begin()

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
        elif self.reload is not None:
            self.reload.load(receipt.tensors)

    def finish_weight_update(self) -> None:
        if self.reload is not None:
            self.reload.finish()
            self.reload = None
        self._forget()

    def shutdown(self) -> None:
        """Forget the receipt; its thread, if any, ends by its own time limit and keeps nothing."""
        self._forget()

    def _forget(self) -> None:
        receipt, self.receipt = self.receipt, None
        # A thread that packs reads it still, and gives it back; so does a model half loaded.
        if receipt is not None and receipt.phase == "staged" and receipt.packing is None:
            if self.reload is None:
                self._used(receipt)


class MusterWorkerExtension:
    """Mixed into vLLM's worker: the verbs that give an answer."""

    weight_transfer_engine: Any
    model_runner: Any
    _weight_update_active: bool

    def muster_update_status(self) -> dict[str, Any] | None:
        """The receipt's status, or None when nothing is in hand."""
        receipt = self.weight_transfer_engine.receipt
        return receipt.status() if receipt is not None else None

    def muster_pack(self) -> dict[str, Any] | None:
        """Go on packing, if there is something to pack; the status."""
        self.weight_transfer_engine.pack()
        return self.muster_update_status()

    def muster_drop_update(self) -> bool:
        """Forget an update that failed after its start, else vLLM would never begin another.

        False: loading again stopped half way, so this model takes no other.
        """
        self._weight_update_active = False
        self.weight_transfer_engine.shutdown()
        reload = self.weight_transfer_engine.reload
        return reload is None or not reload.under_way

    def muster_attention_backend(self) -> str:
        """Name of the kernels that compute attention; empty when the runner does not tell."""
        groups = [one for some in getattr(self.model_runner, "attn_groups", ()) for one in some]
        return "+".join(sorted({group.backend.get_name() for group in groups}))
