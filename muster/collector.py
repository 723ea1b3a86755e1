"""Python's cyclic collector in a service that keeps many objects alive.

Owns: `settle`. Promise: what start-up made is never looked at again, and a full pass over
everything else, which stops the event loop for as long as there are objects, comes rarely instead
of several times a minute; reference counts free what has no cycles as before. Does not cover:
cycles themselves (a soak shows whether memory grows).
"""

from __future__ import annotations

import gc

# Measured for a router of 2,048 episodes (docs/results/router.md). A young pass looks at this many
# objects at most and takes about a millisecond.
_YOUNG, _MIDDLE, _FULL = 10_000, 20, 10


def settle() -> None:
    """Call once, when a service is wired and before it serves."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _FULL)
