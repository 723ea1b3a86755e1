"""Simulated performance of collection: modelled engines, boxes and tools around the real machines.

Owns: time to a trainable batch, in seconds of the simulation. Promise: equal seeds give equal
figures; arms meet the same tasks, lengths, tool times and failures. Does not cover: faults and
invariants (the other modules of `sim`).
"""
