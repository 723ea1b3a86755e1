"""A scripted engine: no model, no torch, the same contract as the real one.

Owns: `FakeEngine` and its `Script`. Promise: deterministic: the tokens follow from prompt, seed and
position, the log-probabilities from context and version, so Score repeats what sampling said.
Failures are asked for by name; time passes only where the script says so; memory does not grow with
requests. Does not cover: receiving weights (a `Receive` function can be given for that), speaking
in words (fake_words.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import AsyncGenerator, Callable, Mapping

from muster.background import in_daemon
from muster.clock import monotonic
from muster.errors import Refused, Unavailable
from muster.fingerprint import ServingFingerprint
from muster.transfer.active import ActiveRequests
from muster.transfer.arriving import Source
from muster.transfer.manifest import Manifest
from muster.types import FinishReason, Value
from services.inference.adapters.fake_cache import PrefixCache
from services.inference.adapters.fake_choices import mask_of, routing_of
from services.inference.adapters.fake_words import Speak
from services.inference.engine import (
    ApplyFailed,
    Chunk,
    CommitFigures,
    Finish,
    Load,
    Sampling,
    Scored,
    UpdatePhase,
    UpdateStatus,
)
from services.inference.floors import Floors
from services.inference.spans import spans_from_labels

Receive = Callable[[Manifest, Source], str]
"""Blocks until the weights are here; empty when they are right, else what is wrong."""
_VOCABULARY = 1000
_COUNTED = {
    ActiveRequests.FINISH: "finished",
    ActiveRequests.ABORT: "aborted",
    ActiveRequests.KEEP: "kept",
    ActiveRequests.RECOMPUTE: "recomputed",
}


class Script(Value, frozen=True):
    """How a fake engine behaves. Times in seconds."""

    replies: tuple[tuple[int, ...], ...] = ()  # used in turn, then the last again; () = by hash
    chunk: int = 1  # tokens that leave together
    length: int = 16  # tokens of a hashed reply, before its stop token
    step_s: float = 0.0  # between two tokens
    start_s: float = 0.0
    switch: Mapping[int, int] = {}  # at that token of a request the engine's version becomes this
    wedged: bool = False  # sampling never gives a token; only abort ends it
    kv_tokens: int = 1 << 16  # of its prefix cache, and of its credit
    block: int = 16  # tokens of a KV block
    mask_ids_max: int = 1024  # 0: it tells no masks
    experts: tuple[int, int] = (0, 0)  # layers, experts of each token; of a model without any
    stale: bool = False  # after an apply the label stays the old one
    fail: frozenset[str] = frozenset()  # start, sample, score, prepare, receive, apply, alive


class FakeEngine:
    """See `services.inference.engine.Engine`."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        receive: Receive | None = None,
        speak: Speak | None = None,
    ):
        """speak: what it says where the script has no replies; None: hashed tokens."""
        self.script, self._speak = script or Script(), speak
        self.fingerprint = ServingFingerprint("fake", dtype="float32", head_dtype="float32")
        self.mask_ids_max = self.script.mask_ids_max
        self.block_size = self.script.block
        self._cache = PrefixCache(self.script.kv_tokens, self.script.block)
        self._steps = 0
        self._receive = receive or (lambda manifest, group: "")
        self._floors = Floors()
        self._replies = 0
        self._total = 0
        self._live: dict[str, asyncio.Event] = {}
        self._sampled: dict[str, int] = {}  # tokens of each live request
        self._idle, self._taking = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._taking.set()
        self._update = UpdateStatus()
        self._broken = False

    def rescript(self, script: Script) -> None:
        """Behave like this from now on."""
        self.script, self.mask_ids_max = script, script.mask_ids_max

    async def start(self, version: int) -> None:
        """See Engine."""
        await asyncio.sleep(self.script.start_s)
        self._fail_if("start")
        self._floors = Floors(version)

    async def sample(self, request: Sampling) -> AsyncGenerator[Chunk | Finish, None]:
        """See Engine."""
        if self._broken:
            raise Unavailable("the last update did not end well", way_out="publish again in full")
        reply = self._reply(request)
        await self._taking.wait()
        self._floors.begun(request.request_id)
        aborted = self._live[request.request_id] = asyncio.Event()
        self._idle.clear()
        began = monotonic()
        salt = self._floors.salt
        cached = self._cache.cached(request.prompt, salt)
        self._cache.take(request.prompt, salt)
        context, sampled = _Context(request.prompt), list[int]()
        piece = _Piece()
        labels: list[tuple[str, int, int]] = []
        reason = FinishReason.LENGTH
        try:
            for at in range(request.max_tokens):
                if await self._step(aborted):
                    reason = FinishReason.ABORT
                    break
                self._switch(self.script.switch.get(at, self._version))
                self._fail_if("sample")
                token = reply[at] if at < len(reply) else context.next_token(at)
                piece.add(token, context.take(token, self._version))
                sampled.append(token)
                _label(labels, self._version, at)
                self._total += 1
                self._sampled[request.request_id] = at + 1
                self._steps += 1
                if len(piece) >= self.script.chunk:
                    yield piece.flush()
                if token in request.stop_token_ids:
                    reason = FinishReason.STOP
                    break
            if len(piece):
                yield piece.flush()
            spans = spans_from_labels(labels, self._floors.ended(request.request_id))
            self._cache.take((*request.prompt, *sampled), salt)
            self._over(request.request_id)
            start, params = request.experts_from, request.params
            yield Finish(
                reason,
                spans,
                cached,
                decode_s=monotonic() - began,
                experts=routing_of((*request.prompt, *sampled), start, *self.script.experts),
                experts_from=start,
                mask=mask_of(sampled, params, _VOCABULARY) if self.mask_ids_max else None,
            )
        finally:
            self._over(request.request_id)

    def _over(self, request_id: str) -> None:
        """It has ended, whatever its caller still does with the end."""
        self._live.pop(request_id, None)
        self._sampled.pop(request_id, None)
        self._floors.ended(request_id)
        if not self._live:
            self._idle.set()

    @property
    def _version(self) -> int:
        return self._floors.version

    def _switch(self, version: int, *, kept: bool = False) -> None:
        if version != self._version:
            self._floors.committed(version, kept=kept)

    def _reply(self, request: Sampling) -> tuple[int, ...]:
        """The scripted reply, or a hashed one that ends with the first stop token."""
        if self.script.replies:
            index = min(self._replies, len(self.script.replies) - 1)
            self._replies += 1
            return self.script.replies[index]
        if self._speak is not None:
            return (*self._speak(request), *request.stop_token_ids[:1])
        context = _Context(request.prompt)
        seed = request.params.seed
        head = [context.next_token(seed + at) for at in range(self.script.length)]
        return (*head, *request.stop_token_ids[:1])

    async def _step(self, aborted: asyncio.Event) -> bool:
        """Let time pass; True if the request was aborted meanwhile."""
        if self.script.wedged:
            await aborted.wait()
        await asyncio.sleep(self.script.step_s)
        return aborted.is_set()

    async def abort(self, request_id: str) -> bool:
        """See Engine."""
        live = self._live.get(request_id)
        if live is None:
            return False
        live.set()
        return True

    async def score(self, token_ids: tuple[int, ...], temperature: float) -> Scored:
        """See Engine; any temperature, which it ignores."""
        del temperature
        self._fail_if("score")
        version = self._version
        context = _Context(token_ids[:1])
        logprobs = [context.take(token, version) for token in token_ids[1:]]
        return Scored(tuple(logprobs), version)

    def alive(self) -> bool:
        """See Engine."""
        return "alive" not in self.script.fail

    def load(self) -> Load:
        """See Engine."""
        return Load(len(self._live), 0, self.script.kv_tokens, 0, self._total, self._steps)

    async def prepare_update(self, manifest: Manifest, source: Source) -> None:
        """See Engine."""
        self._fail_if("prepare")
        if self._update.phase in (UpdatePhase.RECEIVING, UpdatePhase.STAGED):
            raise Refused(f"version {self._update.version} is {self._update.phase}")
        mine = self._update = UpdateStatus(UpdatePhase.RECEIVING, manifest.version)
        in_daemon(lambda: self._arrive(mine, manifest, source), f"receive-{manifest.version}")

    def _arrive(self, mine: UpdateStatus, manifest: Manifest, source: Source) -> None:
        began = monotonic()
        wrong = (
            "asked to fail" if "receive" in self.script.fail else self._receive(manifest, source)
        )
        if self._update is mine:  # else aborted meanwhile
            phase = UpdatePhase.FAILED if wrong else UpdatePhase.STAGED
            self._update = UpdateStatus(phase, manifest.version, wrong, monotonic() - began)

    async def update_status(self) -> UpdateStatus:
        """See Engine."""
        return self._update

    async def commit_update(
        self, version: int, active: ActiveRequests = ActiveRequests.RECOMPUTE
    ) -> CommitFigures:
        """See Engine. Requests that are to finish are waited for without a limit."""
        update = self._update
        if update.phase is not UpdatePhase.STAGED or update.version != version:
            raise Refused(
                f"that version is not staged ({update.phase})", field="version", value=version
            )
        before = len(self._live)
        lost = sum(self._sampled.values()) if active is ActiveRequests.ABORT else 0
        if active in (ActiveRequests.FINISH, ActiveRequests.ABORT):
            self._taking.clear()
            if active is ActiveRequests.ABORT:
                await self.shutdown()
            await self._idle.wait()
            self._taking.set()
        self._update = UpdateStatus()
        if "apply" in self.script.fail:
            self._broken = True
            raise ApplyFailed("asked to fail")
        if not self.script.stale:
            self._switch(version, kept=active is ActiveRequests.KEEP)
        if self._version != version:  # its canary
            self._broken = True
            raise ApplyFailed(f"canary failed: the label is {self._version}")
        self._broken = False
        self._cache.clear()
        counts = {f"requests_{_COUNTED[active]}": before}
        return CommitFigures(version, receive_s=update.receive_s, tokens_lost=lost, **counts)

    async def abort_update(self) -> None:
        """See Engine."""
        self._update = UpdateStatus()

    async def shutdown(self) -> None:
        """See Engine."""
        for live in self._live.values():
            live.set()

    def follow(self, version: int) -> None:
        """Serve `version` from the next token on, without an update (follow.py)."""
        if version != self._version:
            self._cache.clear()
        self._switch(version)

    def _fail_if(self, verb: str) -> None:
        if verb in self.script.fail:
            raise Unavailable(f"{verb}: asked to fail", way_out="take that out of the script")


class _Context:
    """The tokens so far, as a digest that grows by one token in constant time."""

    def __init__(self, tokens: tuple[int, ...]):
        self._hash = hashlib.sha256(struct.pack(f"<{len(tokens)}i", *tokens))

    def next_token(self, salt: int) -> int:
        """What follows where no reply says so."""
        return self._drawn(struct.pack("<Q", salt & (1 << 64) - 1)) % _VOCABULARY

    def take(self, token: int, version: int) -> float:
        """The log-probability of `token` here, exact in float32; then it is part of the context."""
        found = self._drawn(struct.pack("<iq", token, version)) % 1024
        self._hash.update(struct.pack("<i", token))
        return -(1 + found) / 256.0

    def _drawn(self, more: bytes) -> int:
        whole = self._hash.copy()
        whole.update(more)
        return int.from_bytes(whole.digest()[:6], "little")


class _Piece:
    """Tokens that leave together."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._logprobs: list[float] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, token: int, logprob: float) -> None:
        self._tokens.append(token)
        self._logprobs.append(logprob)

    def flush(self) -> Chunk:
        chunk = Chunk(tuple(self._tokens), tuple(self._logprobs))
        self._tokens, self._logprobs = [], []
        return chunk


def _label(labels: list[tuple[str, int, int]], version: int, at: int) -> None:
    """Extend the last label by the token at `at`, or begin a new one."""
    if labels and labels[-1][0] == str(version):
        labels[-1] = (labels[-1][0], labels[-1][1], at + 1)
    else:
        labels.append((str(version), at, at + 1))
