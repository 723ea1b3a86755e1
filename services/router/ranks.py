"""Who goes first on a full replica: orders by name.

Owns: the orders. Promise: pure and total (the last word has the number of the launch), so equal
states give equal orders; a conversation that was held for too long stands before all others, the
one that waits longest first. Does not cover: who fits (seats.py).
Source: a study of scheduling rollouts on a KV-limited fleet (simulated): largest context first is
best, the smallest first costs 133 % more time per batch, the oldest group first 2.3 %.
"""

from __future__ import annotations

from collections.abc import Callable

from services.router.programs import Key, Program


def largest_context(program: Program) -> Key:
    """What is dearest to prefill again keeps its place."""
    return (1, -program.context, program.number)


def smallest_context(program: Program) -> Key:
    return (1, program.context, program.number)


def oldest_group(program: Program) -> Key:
    """By the first launch of its group, then as largest_context."""
    return (1, program.group_number, -program.context, program.number)


def arrival(program: Program) -> Key:
    """By launch."""
    return (1, program.number)


_ORDERS: dict[str, Callable[[Program], Key]] = {
    "largest_context": largest_context,
    "smallest_context": smallest_context,
    "oldest_group": oldest_group,
    "arrival": arrival,
}


def rank_of(name: str) -> Callable[[Program], Key]:
    """The order of that name (router.rank), smaller keys first; KeyError for an unknown one."""
    order = _ORDERS[name]

    def key(program: Program) -> Key:
        return (0, program.since, program.number) if program.aged else order(program)

    return key
