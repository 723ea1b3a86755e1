"""Receiving a version, with its digests checked while later bytes are still on their way.

Owns: the order of bytes and checks at the receiver. Promise: what is returned is whole and has
every digest of the manifest; whatever is wrong is an Unavailable that names it. At most one thread
beside the caller's; it ends with the call. Does not cover: what becomes of the tensors.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

from muster.errors import Unavailable
from muster.transfer import group as transport
from muster.transfer import manifest as weights


class Staging:
    """The memory that a version is received into, kept from one to the next: memory that was never
    written to is slow (on a virtual machine it takes longer than the transfer itself).

    At most one buffer is kept, as large as the largest version so far. Safe to use from threads.
    """

    def __init__(self, device: Any = "cpu"):
        self._device, self._spare = device, list[Any]()
        self._lock = threading.Lock()

    def take(self, size: int) -> Any:
        """A flat uint8 tensor of that size, the caller's own until it is given back."""
        import torch

        with self._lock:
            spare = self._spare.pop() if self._spare else None
        if spare is None or spare.numel() < size:
            spare = torch.empty(size, dtype=torch.uint8, device=self._device)
        return spare[:size]

    def give_back(self, stream: Any) -> None:
        """Nobody reads or writes it any more."""
        base = stream if stream._base is None else stream._base
        with self._lock:
            if not self._spare or self._spare[0].numel() < base.numel():
                self._spare[:] = [base]


def receive(manifest: weights.Manifest, spec: transport.GroupSpec, staging: Staging) -> Any:
    """The version's stream, verified, in memory of `staging`; whoever gets it gives it back. Blocks
    within the group's limit.

    On another device than the CPU digests are taken of copies, piece by piece.
    """
    slots, total = weights.layout(manifest.tensors)
    group = transport.join(spec)
    stream = staging.take(total)
    checks = _Checks(manifest, slots, stream)
    try:
        group.broadcast(stream, checks.arrived)
    finally:
        group.close()
        wrong = checks.end()
    if wrong:
        staging.give_back(stream)
        raise Unavailable(wrong, field="manifest", way_out="publish that version again in full")
    return stream


class _Checks:
    """Hashes each bucket once it is here, in a thread of its own: a tensor of many buckets is not
    waited for, so little is left to do after the last one."""

    def __init__(self, manifest: weights.Manifest, slots: tuple[weights.Slot, ...], stream: Any):
        self._pairs = list(zip(manifest.tensors, slots, strict=True))
        self._stream, self._wrong = stream, ""
        self._at, self._seen = 0, 0  # the tensor in hand; how much of the stream was looked at
        self._marks: queue.SimpleQueue[int] = queue.SimpleQueue()
        name = f"verify-{manifest.version}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def arrived(self, upto: int) -> None:
        """All bytes below `upto` are here."""
        self._marks.put(upto)

    def end(self) -> str:
        """Nothing more will come; what was wrong, empty when nothing."""
        self._marks.put(-1)
        self._thread.join()
        return self._wrong

    def _run(self) -> None:
        """A thread that died of it would say nothing, as it does of what is right."""
        try:
            while (upto := self._marks.get()) >= 0:
                if not self._wrong:
                    self._look(upto)
        except Exception as error:  # noqa: BLE001 - whatever it is, these bytes were not verified
            name = self._pairs[self._at][0].name
            self._wrong = f"{name} could not be checked: {type(error).__name__}: {error}"
        if self._at < len(self._pairs) and not self._wrong:
            self._wrong = f"{self._pairs[self._at][0].name} and what follows it did not arrive"

    def _look(self, upto: int) -> None:
        while self._at < len(self._pairs) and not self._wrong:
            spec, slot = self._pairs[self._at]
            if self._seen <= slot.start:
                self._hand = weights.Arrived()
            begin, end = max(slot.start, self._seen), min(slot.end, upto)
            if begin < end:
                self._hand.add(self._stream[begin:end].cpu())
            if slot.end > upto:
                break
            self._wrong = self._hand.wrong(spec)
            self._at += 1
        self._seen = upto
