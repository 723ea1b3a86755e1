"""The outer world of the trainer: model, disk, bank; each with a fake."""
