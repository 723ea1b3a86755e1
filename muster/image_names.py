"""Names of images as FROM has them, and patterns of them. Pure.

Promise: the longest pattern that fits decides, the same way in a host and in who chooses one; names
are compared as Docker reads them: `docker.io/library/ubuntu:latest`, `ubuntu:latest` and `ubuntu`
are one. Does not cover: what a pattern stands for (the sandbox's bases).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

from muster.errors import InvalidInput

_SHOWN = 12  # patterns in an error


def fitting(patterns: Iterable[str], image: str) -> str | None:
    """The pattern that counts for an image; None when none fits."""
    name = plain(image)
    found = [one for one in patterns if fnmatch.fnmatchcase(name, plain(one))]
    # The longest first; of two as long the one with fewer wildcards, then by name.
    return min(found, key=lambda p: (-len(plain(p)), sum(map(p.count, "*?[")), p), default=None)


def unknown(image: str, patterns: Iterable[str]) -> InvalidInput:
    """The error of an image that no pattern fits."""
    known = ", ".join(sorted(patterns)[:_SHOWN]) or "none"
    return InvalidInput(
        f"this host has no base for that image; known are: {known}",
        field="environment/Dockerfile FROM",
        value=image[:200],
        way_out=f'set sandbox.bases."{image[:80]}" to host, to a root file system folder or '
        "tarball, or to image:NAME with the docker backend; or name a known one in FROM",
    )


def plain(image: str) -> str:
    """The name without what Docker would add to it anyway."""
    for prefix in ("index.docker.io/", "docker.io/", "library/"):
        image = image.removeprefix(prefix)
    return image.removesuffix(":latest")
