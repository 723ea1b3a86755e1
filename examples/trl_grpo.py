"""TRL's AsyncGRPOTrainer on a `muster up --without trainer`: OUTPUT [STEPS [EPISODES]]."""

import sys

import torch
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from muster.bank import BankClient
from muster.publish import Publisher
from muster.trl import MusterRollouts, MusterWeights, acknowledge_on_save

steps = int(sys.argv[2]) if len(sys.argv) > 2 else 3
episodes = int(sys.argv[3]) if len(sys.argv) > 3 else 16  # of a batch: 4 groups of 4
per_step = episodes + 1  # and a place for what TRL reads ahead
args = AsyncGRPOConfig(
    output_dir=sys.argv[1],
    max_steps=steps,
    save_steps=1,
    learning_rate=2e-6,
    temperature=0.7,  # what the job is sampled at
    per_device_train_batch_size=1,
    gradient_accumulation_steps=per_step,
    token_budget=0,  # the bank says what a step is made of
    gradient_checkpointing=False,
    bf16=False,
    report_to=[],
    use_cpu=not torch.cuda.is_available(),
)
if args.use_cpu:  # TRL asks for the name of the GPU, to tell how much of it is used
    torch.cuda.get_device_name = lambda device=None: "none"
with BankClient() as bank, Publisher(bank.model, bank) as publisher:
    rollouts = MusterRollouts(bank, per_step, steps=steps, temperature=args.temperature)
    trainer = AsyncGRPOTrainer(
        model=str(bank.model),
        args=args,
        train_dataset=[{"prompt": "the tasks are the run's: this is not read"}],
        rollout_worker=rollouts,
        weight_transfer=MusterWeights(publisher, rollouts),
        callbacks=[acknowledge_on_save(bank, rollouts)],
    )
    if args.use_cpu:  # TRL's attention for packed samples is a GPU kernel; one at a time needs none
        trainer.model.set_attn_implementation("sdpa")
    trainer.train()
    print(f"version {publisher.version} is served", flush=True)
