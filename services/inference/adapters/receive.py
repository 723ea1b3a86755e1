"""A receiver for engines without weights of their own: takes the bytes, verifies, drops them.

Lets a fake replica take part in a real publication. Does not cover: applying anything.
"""

from __future__ import annotations

from muster.errors import MusterError
from muster.transfer import group as transfer
from muster.transfer import manifest as weights


def receive_and_verify(manifest: weights.Manifest, spec: transfer.GroupSpec) -> str:
    """Empty when what arrived is what the manifest says, else what is wrong."""
    import torch

    _, total = weights.layout(manifest)
    stream = torch.empty(total, dtype=torch.uint8)
    try:
        group = transfer.join(spec)
        try:
            group.broadcast(stream)
        finally:
            group.close()
    except MusterError as error:
        return str(error)
    return weights.mismatch(weights.unpack(stream, manifest), manifest)
