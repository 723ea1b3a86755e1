"""What is handed to mount(2) for a box."""

from __future__ import annotations

import pytest

from services.sandbox.adapters.native.rootfs import overlay_options

OWN = ",upperdir=a-box-with-a-long-name/upper,workdir=a-box-with-a-long-name/work"


def chain(depth: int) -> str:
    return ":".join(f"l/{100000 + number}/upper" for number in range(depth)) + ":base"


def test_one_mount_takes_far_more_layers_than_a_snapshot_keeps_unsquashed() -> None:
    deepest = 64 + 64  # the largest squash_depth, and some
    assert chain(deepest) in overlay_options(chain(deepest), OWN)


def test_more_than_the_kernel_takes_are_refused_and_not_cut_off() -> None:
    with pytest.raises(OSError, match="squash the snapshot first"):
        overlay_options(chain(400), OWN)
