"""What arrives is checked while the rest is still on its way."""

from __future__ import annotations

import threading

import msgspec
import pytest
import torch

from muster.errors import Unavailable
from muster.transfer import group as transport
from muster.transfer import manifest as weights
from muster.transfer.receiving import Staging, receive
from muster.transfer.snapshot import Snapshot

STATE = {
    "embed": torch.arange(3000, dtype=torch.bfloat16).reshape(30, 100),
    "norm": torch.ones(7, dtype=torch.float16),
    "head": torch.full((40, 11), 0.25),
}


def sent(snapshot: Snapshot, stream: torch.Tensor, staging: Staging | None = None) -> torch.Tensor:
    """What a receiver gets of `stream` under the snapshot's manifest."""
    staging = staging or Staging()
    meeting = transport.Meeting("127.0.0.1", 2, timeout_s=20.0)
    spec = transport.GroupSpec(
        "gloo", meeting.host, meeting.port, 0, 2, "run/1/a", 20.0, transport.BUCKET_BYTES
    )

    def send() -> None:
        group = transport.join(spec, store=meeting.store)
        group.broadcast(stream)
        group.close()

    sender = threading.Thread(target=send)
    sender.start()
    try:
        found = receive(snapshot.manifest, msgspec.structs.replace(spec, rank=1), staging)
    finally:
        sender.join()
    assert isinstance(found, torch.Tensor)
    return found


@pytest.fixture
def buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small ones, so that tensors begin and end within them."""
    monkeypatch.setattr(transport, "BUCKET_BYTES", 1000)


@pytest.mark.usefixtures("buckets")
def test_what_arrives_is_what_was_sent() -> None:
    snapshot = Snapshot.take(STATE, version=1, parent=0)
    assert torch.equal(sent(snapshot, snapshot.stream), snapshot.stream)


@pytest.mark.usefixtures("buckets")
@pytest.mark.parametrize("name", STATE)
def test_one_flipped_bit_is_noticed_and_named(name: str) -> None:
    snapshot = Snapshot.take(STATE, version=1, parent=0)
    other = Snapshot(snapshot.manifest, snapshot.stream.clone())
    other.tensors()[name].view(torch.uint8).view(-1)[-1] ^= 1
    with pytest.raises(Unavailable, match=f"{name}: the bytes that arrived"):
        sent(snapshot, other.stream)


@pytest.mark.usefixtures("buckets")
def test_a_tensor_of_many_buckets_is_looked_at_bucket_by_bucket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked, add = list[int](), weights.Arrived.add

    def counted(self: weights.Arrived, piece: torch.Tensor) -> None:
        looked.append(piece.numel())
        add(self, piece)

    monkeypatch.setattr(weights.Arrived, "add", counted)
    snapshot = Snapshot.take(STATE, version=1, parent=0)
    sent(snapshot, snapshot.stream)
    assert max(looked) <= 1000
    assert sum(looked) == snapshot.manifest.bytes_total


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_could_not_be_checked_is_not_taken_for_right(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: weights.Arrived, piece: torch.Tensor) -> None:
        raise ImportError("no module to hash with")

    monkeypatch.setattr(weights.Arrived, "add", broken)
    snapshot = Snapshot.take(STATE, version=1, parent=0)
    with pytest.raises(Unavailable, match="embed could not be checked: ImportError: no module"):
        sent(snapshot, snapshot.stream)


def test_the_next_version_is_received_into_the_same_memory() -> None:
    snapshot, staging = Snapshot.take(STATE, version=1, parent=0), Staging()
    first = sent(snapshot, snapshot.stream, staging)
    at = first.data_ptr()
    staging.give_back(first)
    assert sent(snapshot, snapshot.stream, staging).data_ptr() == at


def test_memory_that_is_in_use_is_not_written_to() -> None:
    snapshot, staging = Snapshot.take(STATE, version=1, parent=0), Staging()
    held = sent(snapshot, snapshot.stream, staging)
    other = Snapshot.take({n: t + 1 for n, t in STATE.items()}, version=2, parent=1)
    assert torch.equal(sent(other, other.stream, staging), other.stream)
    assert torch.equal(held, snapshot.stream)


def test_only_one_buffer_is_kept() -> None:
    staging = Staging()
    small, large = staging.take(10), staging.take(100)
    for stream in (large, small):
        staging.give_back(stream)
    assert staging.take(50).data_ptr() == large.data_ptr()
    assert staging.take(5).data_ptr() not in (large.data_ptr(), small.data_ptr())
