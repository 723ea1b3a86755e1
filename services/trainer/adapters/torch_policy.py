"""A Hugging Face model under training: bfloat16 compute, float32 master weights.

Owns: forward, backward, AdamW, and the files of both. Promise: an unchanged batch gives unchanged
figures; memory is bounded by one micro-batch; weights move only after the last micro-batch.
Does not cover: which tokens count (plan.py), the loss (loss.py), durability (checkpoint.py).

One optimizer step per epoch over the batch means that the policy of the first epoch *is* the
proximal policy: its detached log-probabilities are the proximal recompute, bit for bit, so no
pass is spent on it alone; later epochs are measured against them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muster.engine_tensors import by_checkpoint_name
from muster.errors import Refused
from muster.types import Value
from services.trainer.adapters import model_files
from services.trainer.adapters.torch_forward import Scorer
from services.trainer.adapters.torch_head import HeadSettings
from services.trainer.alarms import check_on_policy
from services.trainer.config import TrainerConfig
from services.trainer.figures import StepFigures
from services.trainer.ledger import StepLedger
from services.trainer.loss import LossSettings, policy_loss
from services.trainer.packing import MicroBatch, pack
from services.trainer.plan import StepPlan
from services.trainer.policy import Judge, SentBack, Stop, Stopped


class TorchSettings(Value, frozen=True):
    """Numbers of the optimizer and bounds of a pass; meanings in config.py."""

    lr: float = 2e-6
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    epochs: int = 1
    loss: LossSettings = LossSettings()
    micro_batch_tokens: int = 512
    logit_rows: int = 256
    vocabulary_chunk: int = 16384
    head_dtype: str = "float32"
    step_kl_tokens: int = 512
    threads: int = 2
    compute: str = "bfloat16"
    activation_checkpointing: bool = False
    frozen: bool = False
    on_policy_max: float = 0.0


class TorchPolicy:
    """See the module. Construct with `load`."""

    def __init__(self, model: Any, side_files: dict[str, bytes], settings: TorchSettings):
        self._model, self._side_files, self._set = model.eval(), side_files, settings
        self._whole = True  # False from the first update of a step until its end
        self._compared = settings.on_policy_max == 0  # with the engine, once or never
        head = HeadSettings(settings.head_dtype, settings.logit_rows, settings.vocabulary_chunk)
        self._scorer = Scorer(model, head)
        self._params: dict[str, Any] = dict(model.named_parameters())  # tied weights once
        self._masters = {
            name: torch.nn.Parameter(p.detach().to(torch.float32, copy=True))
            for name, p in self._params.items()
        }
        for name, parameter in self._params.items():
            parameter.register_post_accumulate_grad_hook(_moves_to(self._masters[name]))
        self._adam = torch.optim.AdamW(
            list(self._masters.values()),
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
            fused=True,
        )

    @classmethod
    def load(cls, folder: Path, settings: TorchSettings) -> TorchPolicy:
        """A model folder, or a checkpoint (then with its optimizer state)."""
        torch.set_num_threads(settings.threads)
        model = model_files.load_model(folder, getattr(torch, settings.compute))
        policy = cls(model, model_files.read_side_files(folder), settings)
        if settings.activation_checkpointing:  # after eval(), which would undo it
            model_files.recompute_layers(model)
        state = model_files.read_optimizer(folder)
        if state is not None:
            policy._restore(state)
        return policy

    def train(
        self, plan: StepPlan, stop: Stop, judge: Judge = lambda measured: True
    ) -> StepFigures:
        """See Policy.train. Raises Stopped, or Refused when the gradient is not finite.

        The judge is asked when the first gradient stands: its pass was the proximal recompute.
        """
        self._check_whole()
        ledger = StepLedger(plan, self._set.loss)
        aside = self._pack(plan, plan.without_contrast)
        with torch.no_grad():
            for row in aside:
                self._check(stop)
                at = ledger.places(row)
                ledger.proximal[at] = self._scorer.logprobs(row, ledger.temperatures[at])
        rows = self._pack(plan, plan.with_contrast)
        loss = norm = clipped = 0.0
        for epoch in range(self._set.epochs if rows else 0):
            loss, clipped = self._accumulate(rows, ledger, stop, first=epoch == 0)
            self._check(stop)
            if not self._compared:
                self._compared = check_on_policy(ledger.on_policy(), self._set.on_policy_max)
            if epoch == 0:
                self._ask(judge, plan, ledger)
            norm = self._update()
        if not rows:
            self._ask(judge, plan, ledger)
        if rows:
            self._measure_step(_drawn(aside, rows, seed=plan.step), ledger, stop)
        self._whole = True
        measured = ~ledger.after.isnan()
        return StepFigures(
            loss=loss,
            grad_norm=norm,
            step_kl=ledger.step_kl(),
            step_kl_tokens=int(measured.sum()),
            step_kl_tokens_aside=int((measured & ~ledger.trained).sum()),
            clipped_share=clipped,
            mismatch=ledger.mismatch(range(len(plan.sequences))),
            per_trajectory=ledger.per_trajectory(plan),
            buckets=ledger.buckets(),
        )

    def _ask(self, judge: Judge, plan: StepPlan, ledger: StepLedger) -> None:
        """Raises SentBack; nothing of the step is left then."""
        if not judge(ledger.per_trajectory(plan)):
            self._drop_gradients()
            raise SentBack

    def engine_state(self) -> dict[str, Tensor]:
        """Live compute weights by checkpoint name; a tied output head is left out."""
        self._check_whole()
        live = {name: parameter.detach() for name, parameter in self._params.items()}
        return by_checkpoint_name(self._model, live)

    def write(self, folder: str, stop: Stop) -> None:
        """See Policy.write: model.safetensors, config, tokenizer, optimizer shards."""
        self._check_whole()
        target = Path(folder)
        model_files.write_side_files(target, self._side_files)
        model_files.write_weights(target, self.engine_state())
        self._check(stop)
        model_files.write_optimizer(target, self._optimizer_state(), lambda: self._check(stop))

    def _pack(self, plan: StepPlan, chosen: Many[int]) -> list[MicroBatch]:
        """Micro-batches of the chosen sequences; picks index into the plan."""
        packed = pack([plan.sequences[i] for i in chosen], tokens_max=self._set.micro_batch_tokens)
        return [row.renumbered(chosen) for row in packed]

    def _accumulate(
        self, rows: list[MicroBatch], ledger: StepLedger, stop: Stop, *, first: bool
    ) -> tuple[float, float]:
        """Gradient of the whole batch; the loss, and the share of tokens that the clip stopped."""
        self._drop_gradients()
        total = sum(len(row.picks) for row in rows)
        loss, clipped = 0.0, 0
        for row in rows:
            self._check(stop)
            at = ledger.places(row)
            current = self._scorer.logprobs(row, ledger.temperatures[at])
            if first:
                ledger.proximal[at] = current.detach()
            parts = policy_loss(
                current,
                ledger.proximal[at],
                ledger.behaviour[at],
                ledger.advantages[at],
                tokens_total=total,
                settings=self._set.loss,
            )
            parts.total.backward()
            loss += float(parts.total.detach())
            clipped += parts.clipped
        return loss, clipped / total

    def _update(self) -> float:
        """Norm of the gradient; with frozen weights it is all that is made of it."""
        masters = list(self._masters.values())
        norm = float(torch.nn.utils.clip_grad_norm_(masters, self._set.max_grad_norm))
        if not norm < float("inf"):
            self._drop_gradients()
            raise Refused(
                "the gradient is not finite, so this update was not made",
                field="grad_norm",
                value=norm,
                way_out="lower trainer.lr and go back to an earlier checkpoint",
            )
        if self._set.frozen:
            self._drop_gradients()
            return norm
        self._whole = False
        self._adam.step()
        with torch.no_grad():
            for name, master in self._masters.items():
                self._params[name].copy_(master)
        self._drop_gradients()
        return norm

    def _measure_step(self, rows: list[MicroBatch], ledger: StepLedger, stop: Stop) -> None:
        """Score rows, in the given order, until `step_kl_tokens` tokens have been scored.

        Whole rows as they were packed before the step: another packing would round otherwise, and
        at a small learning rate the rounding would pass for drift.
        """
        seen = 0
        for row in rows:
            if seen >= self._set.step_kl_tokens:
                return
            self._check(stop)
            at = ledger.places(row)
            with torch.no_grad():
                ledger.after[at] = self._scorer.logprobs(row, ledger.temperatures[at])
            seen += len(row.picks)

    def _check_whole(self) -> None:
        if not self._whole:
            raise Refused(
                "a step was cut after it had begun to move the weights: they are of no version",
                field="policy",
                way_out="load the newest checkpoint",
            )

    def _drop_gradients(self) -> None:
        for master in self._masters.values():
            master.grad = None

    @staticmethod
    def _check(stop: Stop) -> None:
        if stop():
            raise Stopped

    def _optimizer_state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            state[f"master.{name}"] = master.detach()
            for key, value in self._adam.state[master].items():
                state[f"{key}.{name}"] = value
        return state

    def _restore(self, state: dict[str, Tensor]) -> None:
        for name, master in self._masters.items():
            with torch.no_grad():
                master.copy_(state[f"master.{name}"])
            if f"step.{name}" in state:
                keys = ("step", "exp_avg", "exp_avg_sq")
                self._adam.state[master] = {key: state[f"{key}.{name}"] for key in keys}


def _drawn(aside: list[MicroBatch], trained: list[MicroBatch], *, seed: int) -> list[MicroBatch]:
    """The rows in which a step's drift is measured: those without gradient first, each at random.

    Rows that were trained on drift more than others would; they come in only when too few tokens
    were held aside. Rows are packed by length, so their order would be a choice of long episodes.
    """
    chance = random.Random(seed)
    return [
        *chance.sample(aside, len(aside)),
        *chance.sample(trained, len(trained)),
    ]


def _moves_to(master: Any) -> Any:
    """Hook: add a finished bfloat16 gradient to the float32 one and free it."""

    def move(parameter: Any) -> None:
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return move


def settings_of(config: TrainerConfig) -> TorchSettings:
    """The part of the configuration that the policy needs."""
    loss = LossSettings(**{n: getattr(config, n) for n in LossSettings.__struct_fields__})
    names = [name for name in TorchSettings.__struct_fields__ if name != "loss"]
    return TorchSettings(loss=loss, **{name: getattr(config, name) for name in names})
