"""Engines: `fake` (scripted, no dependencies) and `vllm`."""
