"""From the image that a task's FROM names to what a box starts from here. Pure.

Owns: the reading of `sandbox.bases`. Promise: the longest pattern that fits an image decides, and
an image that none fits is refused by name, never replaced by something else; a setting that cannot
be meant is a ConfigError with its field and value. Does not cover: how names are compared
(muster.image_names), folders, tarballs and their digests (adapters/native/basestore.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum

from muster import image_names
from muster.errors import ConfigError
from muster.types import Value

HOST = "host"  # the name of the base that is made from this machine's /usr
_USUAL = {"muster/host-base": HOST, "scratch": HOST}
_TARBALLS = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2")
_PACKED_OTHERWISE = (".tar.zst", ".tzst", ".zip", ".qcow2", ".img", ".squashfs")
_PATTERN = re.compile(r"[A-Za-z0-9*?\[\]][A-Za-z0-9._/:@*?\[\]!-]{0,254}\Z")
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")


class Kind(StrEnum):
    """What a setting of `sandbox.bases` stands for."""

    HOST = "host"
    FOLDER = "folder"
    TARBALL = "tarball"
    IMAGE = "image"


class BaseSetting(Value, frozen=True):
    """One value of `sandbox.bases`.

    where: path of a folder or tarball, or the name of an image. digest: the sha256 (hexadecimal)
    that it has to have; empty when none is given.
    """

    kind: Kind
    where: str = ""
    digest: str = ""


NATIVE = frozenset({Kind.HOST, Kind.FOLDER, Kind.TARBALL})
DOCKER = frozenset({Kind.IMAGE})


def read(settings: Mapping[str, str], kinds: frozenset[Kind]) -> dict[str, BaseSetting]:
    """Pattern → what it stands for, with `muster/host-base` and `scratch` where `kinds` has host.

    kinds: what the backend can start from. Raises ConfigError (field `sandbox.bases."PATTERN"`).
    """
    found: dict[str, BaseSetting] = {}
    for pattern, value in settings.items():
        field = f'sandbox.bases."{pattern}"'
        if not _PATTERN.match(pattern):
            raise ConfigError(
                "not a pattern of image names",
                field=field,
                value=value,
                way_out='write a name as in FROM, with `*` for any part: "ubuntu:*"',
            )
        setting = _setting(field, value)
        if setting.kind not in kinds:
            raise ConfigError(
                f"this backend cannot start boxes from {_said(setting.kind)}",
                field=field,
                value=value,
                way_out=f"name {' or '.join(_said(kind) for kind in sorted(kinds))}, "
                "or choose another sandbox.backend",
            )
        found[pattern] = setting
    if Kind.HOST in kinds:
        found = {name: BaseSetting(Kind(value)) for name, value in _USUAL.items()} | found
    return found


def _setting(field: str, value: str) -> BaseSetting:
    if value == HOST:
        return BaseSetting(Kind.HOST)
    if value.startswith("image:"):
        name = value.removeprefix("image:")
        if not name or name != name.strip() or "*" in name:
            raise ConfigError(
                "names no image",
                field=field,
                value=value,
                way_out="write image:NAME, as the Docker Engine lists it",
            )
        return BaseSetting(Kind.IMAGE, name)
    path, at, digest = value.partition("@")
    problem, way_out = "", ""
    if at and not (digest.startswith("sha256:") and _DIGEST.match(digest[7:])):
        problem = "has no sha256 after the @"
        way_out = "write PATH@sha256: and 64 hexadecimal digits (sha256sum of a tarball)"
    elif not path.startswith("/"):
        problem = "is neither host, image:NAME nor an absolute path"
        way_out = "give the whole path of a root file system folder or a tarball of one"
    elif path.endswith(_PACKED_OTHERWISE):
        problem = "is packed in a way that this service does not read"
        way_out = f"unpack it into a folder, or pack it again as one of {', '.join(_TARBALLS)}"
    if problem:
        raise ConfigError(problem, field=field, value=value, way_out=way_out)
    kind = Kind.TARBALL if path.endswith(_TARBALLS) else Kind.FOLDER
    return BaseSetting(kind, path, digest.removeprefix("sha256:"))


def _said(kind: Kind) -> str:
    return {
        Kind.HOST: "host",
        Kind.FOLDER: "a root file system folder",
        Kind.TARBALL: "a tarball",
        Kind.IMAGE: "image:NAME",
    }[kind]


class Bases:
    """What each known pattern is taken from; `names`: pattern → name of a base (Source.base)."""

    def __init__(self, names: Mapping[str, str] | None = None):
        self._names = dict(_USUAL if names is None else names)

    @property
    def patterns(self) -> tuple[str, ...]:
        """The images that are known here."""
        return tuple(sorted(self._names))

    def base_for(self, image: str) -> str:
        """The base for an image as FROM names it; InvalidInput when no pattern fits."""
        pattern = image_names.fitting(self._names, image)
        if pattern is None:
            raise image_names.unknown(image, self._names)
        return self._names[pattern]
