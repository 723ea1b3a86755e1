"""Frames between service, keeper and box: a JSON header and raw bytes.

Promise: sizes are checked before anything is read; a peer that sends nonsense gives ProtocolError.
Layout: uint32 header length, uint32 blob length (little endian), header, blob.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import Any

HEADER_MAX = 1 << 20
BLOB_MAX = 8 << 20
PREFIX = struct.Struct("<II")


class ProtocolError(Exception):
    """The peer is gone or does not speak as agreed."""


def encode(header: dict[str, Any], blob: bytes = b"") -> bytes:
    """One frame."""
    text = json.dumps(header).encode()
    if len(text) > HEADER_MAX or len(blob) > BLOB_MAX:
        raise ProtocolError(f"frame too large: {len(text)} + {len(blob)} bytes")
    return PREFIX.pack(len(text), len(blob)) + text + blob


def sizes(prefix: bytes) -> tuple[int, int]:
    """Header and blob length of the frame that begins with `prefix`."""
    header, blob = PREFIX.unpack(prefix)
    if header > HEADER_MAX or blob > BLOB_MAX:
        raise ProtocolError(f"frame too large: {header} + {blob} bytes")
    return header, blob


def decode(text: bytes) -> dict[str, Any]:
    """A frame's header."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ProtocolError(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ProtocolError("the header is not an object")
    return found


def send(peer: socket.socket, header: dict[str, Any], blob: bytes = b"") -> None:
    """Blocking send, for the keeper and PID 1."""
    peer.sendall(encode(header, blob))


def receive(peer: socket.socket) -> tuple[dict[str, Any], bytes, int]:
    """Blocking receive: header, blob, and a passed descriptor (-1 without); EOFError at the end."""
    prefix, fd = receive_fd(peer, PREFIX.size)
    if not prefix:
        raise EOFError
    try:
        prefix += _exactly(peer, PREFIX.size - len(prefix))
        header, blob = sizes(prefix)
        return decode(_exactly(peer, header)), _exactly(peer, blob), fd
    except BaseException:
        if fd >= 0:
            os.close(fd)
        raise


def receive_fd(peer: socket.socket, size: int) -> tuple[bytes, int]:
    """Up to `size` bytes and a passed descriptor (-1 without), which no child inherits."""
    data, fds, _, _ = socket.recv_fds(peer, size, 1)
    for fd in fds:
        os.set_inheritable(fd, False)  # recv_fds takes flags, and ignores them
    return data, fds[0] if fds else -1


def _exactly(peer: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = peer.recv(min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
