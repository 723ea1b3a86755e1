"""Files, folders and links as one run of bytes between a service and PID 1 of a box.

Promise: what is read is checked for form and bounds before use; no name leads out of the folder
that the parcel is opened in, and no link points out of it. Layout of one item: length of a JSON
header (uint32, little endian), the header [path, kind, mode, link, size], `size` bytes.
Pure; standard library only.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator

KINDS = ("file", "folder", "link")
ITEMS_MAX = 20_000
PATH_MAX = 4096
DEPTH_MAX = 64
_LENGTH = struct.Struct("<I")
_HEADER_MAX = 4 * PATH_MAX * 6 + 256  # a byte of a name may become six in JSON

Item = tuple[str, str, int, str, bytes]  # path, kind, mode, link, data


class Refused(Exception):
    """An item, or the whole, is not carried: `path` says which, the text why."""

    def __init__(self, path: str, why: str):
        super().__init__(why)
        self.path, self.why = path, why


def write(item: Item) -> bytes:
    """One item."""
    path, kind, mode, link, data = item
    header = json.dumps([path, kind, mode, link, len(data)]).encode()
    return _LENGTH.pack(len(header)) + header + data


def read(blob: bytes, size_max: int) -> Iterator[Item]:
    """The items of a parcel. Raises ValueError for nonsense, Refused for what is not carried.

    size_max: most bytes of all files together.
    """
    at = total = count = 0
    while at < len(blob):
        if len(blob) - at < _LENGTH.size:
            raise ValueError("cut short")
        (length,) = _LENGTH.unpack_from(blob, at)
        at += _LENGTH.size
        if length > min(_HEADER_MAX, len(blob) - at):
            raise ValueError("a header too long")
        path, kind, mode, link, size = _header(blob[at : at + length])
        at += length
        if size > len(blob) - at:
            raise ValueError("cut short")
        count, total = count + 1, total + size
        if count > ITEMS_MAX or total > size_max:
            raise Refused(path, f"over {ITEMS_MAX} items or {size_max} bytes in all")
        check(path, kind, link)
        yield path, kind, mode, link, blob[at : at + size]
        at += size


def _header(text: bytes) -> tuple[str, str, int, str, int]:
    found = json.loads(text.decode("ascii"))
    if not isinstance(found, list) or [type(part) for part in found] != [str, str, int, str, int]:
        raise ValueError("not a header")
    path, kind, mode, link, size = found
    if kind not in KINDS or size < 0 or (size and kind != "file"):
        raise ValueError("not a header")
    return path, kind, mode & 0o777, link, size


def check(path: str, kind: str, link: str = "") -> None:
    """Raises Refused for an item that would lead out of the folder that it is opened in."""
    if kind not in KINDS:
        raise Refused(path, f"is a {kind}: only files, folders and links are copied")
    for text in (path, link):
        if "\0" in text or len(os_bytes(path, text)) > PATH_MAX:
            raise Refused(path, f"has a name with a NUL, or of over {PATH_MAX} bytes")
    parts = path.split("/")
    if path.startswith("/") or not all(part and part not in (".", "..") for part in parts):
        raise Refused(path, "is not a plain relative path")
    if len(parts) > DEPTH_MAX:
        raise Refused(path, f"lies over {DEPTH_MAX} folders deep")
    if kind == "link":
        check_link(path, link, len(parts) - 1)


def parts(path: str) -> list[str]:
    """The names of an absolute path in a box; Refused for one that is not plain."""
    if not path.startswith("/") or "\0" in path or len(path) > PATH_MAX:
        raise Refused(path, "is not an absolute path")
    found = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in found:
        raise Refused(path, "has a '..' in it")
    return found


def check_link(path: str, link: str, depth: int) -> None:
    """Raises Refused for a link that leaves its folder; `depth`: folders between that and it.

    `..` is taken at the beginning only: there it leaves real folders. After a name it would leave
    whatever that name, which may be a link, leads to.
    """
    if not link or link.startswith("/"):
        raise Refused(path, f"is a link to an absolute path ({link!r})" if link else "is no link")
    parts = [part for part in link.split("/") if part not in ("", ".")]
    up = 0
    while up < len(parts) and parts[up] == "..":
        up += 1
    if up > depth or ".." in parts[up:]:
        raise Refused(path, f"is a link that leads out of the copied folder ({link!r})")


def os_bytes(path: str, text: str) -> bytes:
    """UTF-8; Refused for a name that no message could carry."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        shown = path.encode("utf-8", "replace").decode()
        raise Refused(shown, "has a name or a target that is not UTF-8") from None
