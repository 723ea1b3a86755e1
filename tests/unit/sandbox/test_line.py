"""A socket whose owner never waits: half frames, peers that read nothing, peers that go."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator

import pytest

from services.sandbox.adapters.native import wire
from services.sandbox.adapters.native.line import Line

Ends = tuple[Line, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    own, peer = socket.socketpair()
    peer.settimeout(10)
    line = Line(own)
    yield line, peer
    line.close()
    peer.close()


def test_a_frame_is_there_once_it_is_whole(ends: Ends) -> None:
    line, peer = ends
    frame = wire.encode({"op": "x"}, b"blob")
    for at in range(len(frame)):
        assert line.hear()
        assert line.next() is None
        peer.sendall(frame[at : at + 1])
    assert line.hear()
    assert line.next() == ({"op": "x"}, b"blob")
    assert line.next() is None


def test_frames_come_one_at_a_time_and_no_more_is_read_before_that(ends: Ends) -> None:
    line, peer = ends
    wire.send(peer, {"n": 1})
    wire.send(peer, {"n": 2})
    assert line.hear()
    assert not line.events & select.POLLIN
    assert [line.next(), line.next()] == [({"n": 1}, b""), ({"n": 2}, b"")]
    assert line.events & select.POLLIN


def test_what_the_peer_does_not_read_yet_is_sent_later(ends: Ends) -> None:
    line, peer = ends
    blob = b"x" * (4 << 20)
    assert line.tell({"n": 1}, blob)
    assert line.events & select.POLLOUT
    got = bytearray()
    whole = len(wire.encode({"n": 1}, blob))
    while len(got) < whole:
        got += peer.recv(1 << 20)
        assert line.flush()
    assert bytes(got).endswith(blob)
    assert not line.events & select.POLLOUT


def test_a_peer_that_went_is_told(ends: Ends) -> None:
    line, peer = ends
    peer.close()
    assert not line.hear()
    assert not line.tell({"n": 1})


def test_a_frame_beyond_the_bounds_ends_it(ends: Ends) -> None:
    line, peer = ends
    peer.sendall(wire.PREFIX.pack(wire.HEADER_MAX + 1, 0))
    assert not line.hear()
