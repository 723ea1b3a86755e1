"""How many groups may be open: the staleness bound, with fates flowing back.

Owns: one formula. Promise: a slot is freed when its group is trained or filtered, so a dropped
group can never starve the trainer. Source: AReaL's capacity (arXiv 2505.24298, staleness_manager):
(lag + version + 1) * batch - (accepted + running), with `accepted` counted in trained batches.
"""

from __future__ import annotations


def open_groups_max(
    *, lag_max: int, published_step: int, steps_trained: int, groups_per_batch: int
) -> int:
    """Groups without a fate that the bound allows now.

    `published_step` is the optimizer step that made the newest published version (version numbers
    have holes after a rollback, steps have none). `steps_trained` counts batches whose groups have
    their fate; until their version is published nothing newer is launched at lag 0.
    """
    batches = lag_max + published_step + 1 - steps_trained
    return max(0, batches) * groups_per_batch
