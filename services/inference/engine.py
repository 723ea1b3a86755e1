"""What every engine must be able to do, and the words that pass between it and the service.

Owns: the `Engine` protocol and its carriers. Promise: no I/O. A contract suite
(tests/contract/test_engine.py) holds every adapter to the docstrings here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from enum import StrEnum
from typing import Protocol

from muster.fingerprint import ServingFingerprint
from muster.transfer.active import ActiveRequests
from muster.transfer.arriving import Source
from muster.transfer.manifest import Manifest
from muster.types import (
    FinishReason,
    RoutedExperts,
    SamplingMask,
    SamplingParams,
    Value,
    VersionSpan,
)


class UpdatePhase(StrEnum):
    """Where the arriving of new weights stands."""

    IDLE = "idle"
    RECEIVING = "receiving"
    STAGED = "staged"  # whole and verified, not yet applied
    FAILED = "failed"


class Sampling(Value, frozen=True):
    """One request: the whole context in, at most `max_tokens` out.

    experts_from: whoever asks has the routing of the context's tokens before this one.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    experts_from: int = 0


class Chunk(Value, frozen=True):
    """New tokens since the last chunk; `logprobs` has one entry per token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class Finish(Value, frozen=True):
    """The end of a request. `spans` cover all its sampled tokens without a gap.

    mask: of every sampled token, when the request had top-p or top-k. experts: of the context from
    token `experts_from` on and of all sampled tokens, where the model has any; `experts_dropped`:
    they were too large to send.
    """

    reason: FinishReason
    spans: tuple[VersionSpan, ...]
    cached_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    experts: RoutedExperts | None = None
    experts_from: int = 0
    experts_dropped: bool = False
    mask: SamplingMask | None = None


class Scored(Value, frozen=True):
    """Log-probability of each token after the first, and the version that gave them."""

    logprobs: tuple[float, ...]
    version: int


class Load(Value, frozen=True):
    """What the engine is busy with; KV in tokens; `steps` it has taken since its start."""

    running: int = 0
    waiting: int = 0
    kv_tokens_total: int = 0
    kv_tokens_used: int = 0
    tokens_generated: int = 0
    steps: int = 0


class UpdateStatus(Value, frozen=True):
    """State of the update in hand. `error` is for people, set when FAILED."""

    phase: UpdatePhase = UpdatePhase.IDLE
    version: int = 0
    error: str = ""
    receive_s: float = 0.0


class CommitFigures(Value, frozen=True):
    """What one apply cost, in seconds.

    pause_s: from asking the engine to pause until it stepped again. token_gap_s: longest time in
    which no token left around the apply; 0 when nothing was being sampled. When the first token
    after the apply is late it is the gap so far, because the answer does not wait for it: a commit
    is answered when the version is served, or at most 0.2 s later.
    """

    version: int
    pause_s: float = 0.0
    receive_s: float = 0.0
    apply_s: float = 0.0
    token_gap_s: float = 0.0
    requests_finished: int = 0
    requests_aborted: int = 0
    requests_kept: int = 0
    requests_recomputed: int = 0
    tokens_lost: int = 0


class ApplyFailed(Exception):
    """The engine may hold mixed weights: nothing it says counts until a full update succeeds."""


class Engine(Protocol):
    """One engine that serves one version at a time."""

    fingerprint: ServingFingerprint
    """What its figures depend on; whole once it has started."""
    mask_ids_max: int
    """Largest top_k for which it returns masks; 0: it returns none."""
    block_size: int
    """Tokens of a KV block: prefixes are cached in whole blocks."""

    async def start(self, version: int) -> None:
        """Load, label the weights `version`, warm up and pass the canary; then ready to serve."""

    def sample(self, request: Sampling) -> AsyncGenerator[Chunk | Finish, None]:
        """Chunks as tokens come, then exactly one Finish. Closing the generator aborts.

        A request may span a commit; its spans then say where. Unavailable if the engine dies.
        """

    async def abort(self, request_id: str) -> bool:
        """End a request; its generator finishes with ABORT. False if there is no such request."""

    async def score(self, token_ids: tuple[int, ...], temperature: float) -> Scored:
        """Log-probabilities under the weights served.

        InvalidInput for a temperature that the engine cannot do.
        """

    def alive(self) -> bool:
        """False once the engine has died or can only be restarted; never blocks."""

    def load(self) -> Load:
        """Figures of now; never blocks."""

    async def prepare_update(self, manifest: Manifest, source: Source) -> None:
        """Start receiving in the background; answers at once. One at a time (Refused otherwise)."""

    async def update_status(self) -> UpdateStatus:
        """Where the update stands; STAGED only after every digest was verified."""

    async def commit_update(
        self, version: int, active: ActiveRequests = ActiveRequests.RECOMPUTE
    ) -> CommitFigures:
        """Settle what runs, apply what is staged, label, resume, pass the canary. New requests
        never attend to KV of an older version; those that were kept say so in their spans.

        Refused if `version` is not staged (nothing changed then); ApplyFailed once the weights may
        be mixed.
        """

    async def abort_update(self) -> None:
        """Drop what was staged or is arriving; harmless when idle."""

    async def shutdown(self) -> None:
        """End all processes of the engine within a few seconds."""
