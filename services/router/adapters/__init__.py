"""The router's outer world: tokenizer and chat template of a model folder."""
