"""Reads TensorBoard event files back, the way TensorBoard does: a session that starts at a step
takes back what the files before it had from there on."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from tensorboardX.crc32c import crc32c
from tensorboardX.proto.event_pb2 import Event, SessionLog

_MASK = 0xA282EAD8
Scalars = dict[str, list[tuple[int, float]]]


def scalars(folder: Path) -> Scalars:
    """By tag the steps and values that a board shows."""
    shown: Scalars = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in events(path):
            if event.session_log.status == SessionLog.START:
                for tag, points in shown.items():
                    shown[tag] = [point for point in points if point[0] < event.step]
            for value in event.summary.value:
                number = value.simple_value
                shown.setdefault(value.tag, []).append((event.step, round(number, 6)))
    return {tag: points for tag, points in shown.items() if points}


def events(path: Path) -> Iterator[Event]:
    """TFRecords: length, checksum of it, data, checksum of that."""
    data, at = path.read_bytes(), 0
    while at < len(data):
        header = data[at : at + 8]
        (length,) = struct.unpack("<Q", header)
        body = data[at + 12 : at + 12 + length]
        assert struct.unpack("<I", data[at + 8 : at + 12]) == (_masked(header),)
        end = at + 12 + length
        assert struct.unpack("<I", data[end : end + 4]) == (_masked(body),)
        yield Event.FromString(body)
        at = end + 4


def _masked(data: bytes) -> int:
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + _MASK) & 0xFFFFFFFF
