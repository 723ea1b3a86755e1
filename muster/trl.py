"""TRL's AsyncGRPOTrainer, unchanged, on the batches of a run: the parts that it takes from outside.

    rollouts = MusterRollouts(bank, per_step=17)
    weights = MusterWeights(publisher, rollouts)
    AsyncGRPOTrainer(..., rollout_worker=rollouts, weight_transfer=weights,
                     callbacks=[acknowledge_on_save(bank, rollouts)]).train()

Owns: `MusterRollouts` (a RolloutWorkerProtocol), `MusterWeights` (a WeightTransferProtocol), the
callback. Promise: one batch of the bank is one optimizer step; only sampled tokens are trained on,
with the log-probabilities of the policy that sampled them. Nothing of TRL is imported before it is
needed. Does not cover: TRL's weight_sync_steps above 1.

TRL reads one sample ahead: it wants the first of the next step before it ends this one. At lag 0
there can be none, as its group is opened only when this step's version is served. So each step gets
one place more than a batch fills, and what is left over is filled with copies whose advantage is 0:
they have no gradient. One such copy goes first.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from muster import telemetry
from muster.bank import BankClient
from muster.errors import InvalidInput, Refused
from muster.publish import Publisher
from muster.samples import Batch, Sample

_WAIT_S = 0.2  # between two looks at whether it shall stop
_log = telemetry.logger("muster.trl")


class MusterRollouts:
    """Feeds batches of the bank to TRL, from a thread of its own.

    per_step: samples of one optimizer step (per_device_train_batch_size ×
    gradient_accumulation_steps × processes), at least one more than the episodes of a batch. steps:
    batches to lease; None: without end. temperature: that of the trainer's arguments, which has to
    be the one that was sampled at. `trained`: steps of the batches whose weights were published.
    """

    def __init__(
        self,
        bank: BankClient,
        per_step: int,
        *,
        steps: int | None = None,
        temperature: float = 1.0,
    ):
        self._bank, self._per_step, self._steps = bank, per_step, steps
        self._temperature = temperature
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(maxsize=2 * per_step)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._thread = threading.Thread(target=self._feed, name="muster-rollouts", daemon=True)
        self._stop, self._failed = threading.Event(), list[BaseException]()
        self._version = 0  # TRL's own count of weight syncs
        self._fed: queue.Queue[Batch] = queue.Queue()
        self.trained: list[int] = []
        self.begins_after = bank.next_step - 1

    def start(self) -> None:
        """Called by TRL once the engines have the weights that training begins with."""
        self._thread.start()

    def stop(self) -> None:
        """Called by TRL at the end; what was leased and not acknowledged comes again."""
        self._stop.set()

    def update_model_version(self, model_version: int) -> None:
        """Called by TRL after each sync of weights."""
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raises what ended the feeding. A long wait for a batch is none: the run says why."""
        del stale_after_s
        if self._failed:
            raise self._failed[0]

    def next_trained(self) -> int:
        """Step of the oldest batch whose weights are not published yet; they are about to be."""
        try:
            self.trained.append(self._fed.get_nowait().step)
        except queue.Empty:
            raise Refused(
                "TRL has made a step out of no batch",
                field="gradient_accumulation_steps",
                value=self._per_step,
                way_out="give MusterRollouts the samples of one optimizer step",
            ) from None
        return self.trained[-1]

    def _feed(self) -> None:
        try:
            count = 0
            while not self._stop.is_set() and (self._steps is None or count < self._steps):
                batch = self._bank.lease()
                self._check(batch)
                self._fed.put(batch)
                for sample in self._filled(batch, first=count == 0):
                    self._put(sample)
                count += 1
        except BaseException as error:  # noqa: BLE001 - raised in TRL's thread by check_health
            if not self._stop.is_set():
                _log.error("no more batches: %s", error)
                self._failed.append(error)

    def _put(self, sample: Any) -> None:
        """Waits while TRL has enough; what is left at the end is dropped."""
        while not self._stop.is_set():
            try:
                self.rollout_buffer.put(sample, timeout=_WAIT_S)
                return
            except queue.Full:
                continue

    def _check(self, batch: Batch) -> None:
        if not batch.samples:
            raise InvalidInput(
                "no episode of this batch counts",
                field="batch",
                value=batch.step,
                way_out="see with `muster report` why",
            )
        for sample in batch.samples:
            if sample.allowed:  # TRL's softmax is over the whole vocabulary
                raise InvalidInput(
                    "sampled with top-p or top-k, so its log-probabilities are over what those "
                    "left",
                    field="sampling",
                    value=sample.episode,
                    way_out="submit the job with temperature only, or use sample.allowed in a loss "
                    "of your own",
                )
        if len(batch.samples) >= self._per_step:
            raise InvalidInput(
                f"the batch has {len(batch.samples)} samples, and a step has room for "
                f"{self._per_step - 1} and one that TRL reads ahead",
                field="gradient_accumulation_steps",
                value=self._per_step,
                way_out=f"make it {len(batch.samples) + 1} or more",
            )
        if abs(batch.temperature - self._temperature) > 1e-6:
            raise InvalidInput(
                f"the trainer computes log-probabilities at temperature {self._temperature:g}",
                field="temperature",
                value=batch.temperature,
                way_out="give the trainer's arguments and MusterRollouts the job's temperature",
            )

    def _filled(self, batch: Batch, *, first: bool) -> Iterator[Any]:
        """The batch, and shortest samples without advantage up to the size of a step."""
        blank = min(batch.samples, key=lambda sample: len(sample.token_ids))
        numbers = {group: n for n, group in enumerate(batch.groups)}
        base = batch.step * len(numbers)
        if first:
            yield self._sample(blank, base + numbers[blank.group], advantage=0.0)
        for sample in batch.samples:
            yield self._sample(sample, base + numbers[sample.group], advantage=sample.advantage)
        for _ in range(self._per_step - len(batch.samples)):
            yield self._sample(blank, base + numbers[blank.group], advantage=0.0)

    def _sample(self, sample: Sample, number: int, *, advantage: float) -> Any:
        import numpy
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        return RolloutSample(
            prompt=[],
            completion=[],
            input_ids=numpy.array(sample.token_ids, dtype=numpy.int64),
            completion_mask=numpy.array(sample.loss_mask, dtype=numpy.int64),
            old_log_probs=numpy.array(sample.logprobs, dtype=numpy.float32),
            advantage=advantage,
            model_version=self._version,  # how stale is too stale was the bank's to judge
            group_id=number,
            metrics={"reward": sample.reward},
            enqueued_at=None,
        )


class MusterWeights:
    """TRL's weights to the engines of the run. `publisher` holds what training begins with."""

    def __init__(self, publisher: Publisher, rollouts: MusterRollouts):
        self._publisher, self._rollouts = publisher, rollouts
        self._begun = False

    def init_weight_transfer(self) -> None:
        """Each publication makes its own connections."""

    def pause(self) -> None:
        """An engine stands still for the moment in which it puts weights in place, by itself."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Called by TRL before the first step, and after each: a version of its own."""
        state = dict(iterator)
        if self._begun:
            self._publisher.publish(state, step=self._rollouts.next_trained())
        else:
            self._publisher.publish(state, step=self._rollouts.begins_after, if_changed=True)
        self._begun = True

    def resume(self) -> None:
        """See pause."""

    def destroy(self) -> None:
        """The publisher is closed by whoever opened it."""


def acknowledge_on_save(bank: BankClient, rollouts: MusterRollouts) -> Any:
    """A callback for TRL: whenever it has saved a checkpoint, the bank hears what is in it."""
    from transformers import TrainerCallback

    class AcknowledgeOnSave(TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            del control, others
            if rollouts.trained:
                folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
                bank.acknowledge(rollouts.trained[-1], folder)

    return AcknowledgeOnSave()
