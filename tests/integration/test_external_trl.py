"""TRL's own AsyncGRPOTrainer, unchanged, against the real bank and replicas that really receive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from muster.bank import BankClient
from muster.publish import Publisher
from muster.seat import read_resume
from muster.trl import MusterRollouts, MusterWeights, acknowledge_on_save
from services.inference.replica import State
from tests.integration.test_external_trainer import World
from tests.integration.test_trainer import model as model

pytest.importorskip("trl", reason='TRL is not installed: pip install "muster-rl[trl]"')
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
PER_STEP = 4


@pytest.fixture
async def world(
    tmp_path: Path, redis: Redis, run: str, redis_url: str, model: Path
) -> AsyncIterator[World]:
    made = World(tmp_path, redis, run, redis_url, model)
    async with made.running():
        yield made


def train(world: World, output: Path) -> list[float]:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    words = Tokenizer(models.WordLevel({"<eos>": 0}, unk_token="<eos>"))
    args = AsyncGRPOConfig(
        output_dir=str(output),
        max_steps=2,
        save_steps=1,
        learning_rate=1e-2,
        temperature=0.7,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=PER_STEP,
        token_budget=0,
        gradient_checkpointing=False,
        bf16=False,
        report_to=[],
        use_cpu=True,
    )
    with BankClient(**world.where) as bank, Publisher(bank.model, bank) as publisher:
        rollouts = MusterRollouts(bank, PER_STEP, steps=2, temperature=args.temperature)
        trainer: Any = AsyncGRPOTrainer(
            model=str(bank.model),
            args=args,
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>"),
            train_dataset=[{"prompt": "unread"}],
            rollout_worker=rollouts,
            weight_transfer=MusterWeights(publisher, rollouts),
            callbacks=[acknowledge_on_save(bank, rollouts)],
        )
        trainer.model.set_attn_implementation("sdpa")
        trainer.train()
        return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


async def test_two_steps_of_trl_reach_the_bank_and_the_engines(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.replica("one")
    await world.groups("g-0", "g-1")
    output = tmp_path / "output"
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "none")
    await asyncio.to_thread(train, world, output)
    assert world.served() == {"one": (State.SERVING, 2)}
    assert await world.fates() == [("g-0", 1), ("g-1", 2)]
    at = read_resume(output / "checkpoint-2")
    assert at is not None
    assert (at.step, at.version, at.digest) == (2, 2, (await world.records())[-1].digest)
