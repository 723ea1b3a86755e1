"""GRPO in plain PyTorch, for a `muster up --without trainer`. Arguments: CHECKPOINTS [STEPS]."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from muster.bank import BankClient
from muster.publish import Publisher

folder, steps = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 3
newest = max((p.parent for p in folder.glob("step-*/muster.json")), default=None)  # acknowledged

with BankClient(resume=newest) as bank:
    start = newest or bank.model
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-6, weight_decay=0.0)
    with Publisher(model, bank) as publisher:
        for batch in bank.batches(steps):
            for part in batch.minibatches(2):
                logits = model(part["input_ids"], attention_mask=part["attention_mask"]).logits
                logprobs = (logits[:, :-1] / batch.temperature).log_softmax(-1)
                logprobs = logprobs.gather(-1, part["input_ids"][:, 1:, None]).squeeze(-1)
                ratio = (logprobs - part["logprobs"][:, 1:]).exp()
                gain, mask = part["advantages"][:, None], part["loss_mask"][:, 1:]
                clipped = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
                (-(clipped * mask).sum() / batch.tokens).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            done = publisher.publish()
            checkpoint = folder / f"step-{batch.step:06d}"
            model.save_pretrained(checkpoint)
            tokenizer.save_pretrained(checkpoint)
            bank.acknowledge(batch, checkpoint)
            print(f"step {batch.step}: version {done.version}, {done.serving} replicas", flush=True)
