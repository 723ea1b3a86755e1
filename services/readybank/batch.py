"""Which groups make the next batch.

Owns: the choice. Promise: whole groups, the oldest complete first, ties by id; made at once when
there are enough, whatever order the groups were launched in. Does not cover: admission.
"""

from __future__ import annotations

from collections.abc import Mapping


def choose(ready: Mapping[str, float], groups: int) -> tuple[str, ...]:
    """`groups` ids out of {id: completion time}, or none while there are fewer."""
    if groups < 1 or len(ready) < groups:
        return ()
    return tuple(sorted(ready, key=lambda group: (ready[group], group))[:groups])
