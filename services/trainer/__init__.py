"""The reference trainer: GRPO in PyTorch, and the publisher of weights."""
