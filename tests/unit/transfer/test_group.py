"""The process group: bytes arrive whole, and nobody waits for ever."""

from __future__ import annotations

import contextlib
import itertools
import socket
import subprocess
import sys
import threading

import msgspec
import pytest
import torch

from muster.errors import InvalidInput, Unavailable
from muster.transfer import group
from muster.transfer.group import GroupSpec, Meeting, join


def spec(meeting: Meeting, *, size: int, timeout_s: float = 20.0) -> GroupSpec:
    return GroupSpec("gloo", meeting.host, meeting.port, 0, size, "run/1/a", timeout_s, 1 << 20)


def test_every_rank_gets_the_stream_across_buckets() -> None:
    meeting = Meeting("127.0.0.1", 3, timeout_s=20)
    trainer = spec(meeting, size=3)
    sent = torch.randint(0, 256, (3 * trainer.bucket_bytes + 1000,), dtype=torch.uint8)
    got = [torch.zeros_like(sent), torch.zeros_like(sent)]

    def receive(rank: int) -> None:
        joined = join(msgspec.structs.replace(trainer, rank=rank))
        joined.broadcast(got[rank - 1])
        joined.close()

    threads = [threading.Thread(target=receive, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    joined = join(trainer, store=meeting.store)
    joined.broadcast(sent)
    for thread in threads:
        thread.join()
    joined.close()

    assert torch.equal(got[0], sent)
    assert torch.equal(got[1], sent)


_A_RECEIVER_AT_ITS_END = """
import threading, torch, msgspec
from muster.transfer.group import GroupSpec, Meeting, join
meeting = Meeting("127.0.0.1", 2, timeout_s=20)
trainer = GroupSpec("gloo", meeting.host, meeting.port, 0, 2, "run/1/a", 20.0)
def receive():
    joined = join(msgspec.structs.replace(trainer, rank=1))
    joined.broadcast(torch.zeros(1000, dtype=torch.uint8))
    last.wait()
    joined.close()
last = threading.Event()
receiver = threading.Thread(target=receive, daemon=True)  # as an engine's is
receiver.start()
joined = join(trainer, store=meeting.store)
joined.broadcast(torch.ones(1000, dtype=torch.uint8))
joined.close()
for thread in threading.enumerate():
    if thread.name.startswith("close"):
        thread.join()
last.set()
receiver.join()
"""


def test_a_process_that_ends_as_its_group_ends_is_not_aborted() -> None:
    """Connections are taken down behind the caller's back: a thread in there at the interpreter's
    exit must be waited for."""
    ended = subprocess.run(
        [sys.executable, "-c", _A_RECEIVER_AT_ITS_END], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_rank_that_never_comes_is_not_waited_for() -> None:
    meeting = Meeting("127.0.0.1", 2, timeout_s=0.3)

    with pytest.raises(Unavailable, match="did not come together"):
        join(spec(meeting, size=2, timeout_s=0.3), store=meeting.store)


def test_a_rank_that_leaves_breaks_the_transfer() -> None:
    meeting = Meeting("127.0.0.1", 2, timeout_s=5)
    trainer = spec(meeting, size=2, timeout_s=2)

    def leave() -> None:
        join(msgspec.structs.replace(trainer, rank=1)).close()

    thread = threading.Thread(target=leave)
    thread.start()
    joined = join(trainer, store=meeting.store)
    thread.join()

    with pytest.raises(Unavailable, match="broke off"):
        joined.broadcast(torch.zeros(128 << 20, dtype=torch.uint8))


class OnDevice:
    """A process group as nccl's: `wait` makes the device wait and returns at once."""

    def __init__(self, looks: int):
        self.left = looks  # until it is through
        self.aborted_early = False

    def broadcast(self, tensors: object, options: object) -> OnDevice:
        del tensors, options
        return self

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        self.left -= 1
        return self.left <= 0

    def abort(self) -> None:
        self.aborted_early = self.left > 0


def on_device(looks: int, timeout_s: float) -> tuple[OnDevice, group.WeightGroup]:
    device = OnDevice(looks)
    named = GroupSpec("nccl", "127.0.0.1", 1, 0, 2, "run/1/a", timeout_s)
    return device, group.WeightGroup(named, device, None)


def test_bytes_on_a_device_have_left_when_the_broadcast_is_over() -> None:
    device, joined = on_device(looks=3, timeout_s=20.0)
    joined.broadcast(torch.zeros(100, dtype=torch.uint8))
    joined.close()

    assert not device.aborted_early


def test_a_device_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count()
    monkeypatch.setattr(group, "monotonic", lambda: float(next(now)))
    _, joined = on_device(looks=1000, timeout_s=20.0)

    with pytest.raises(Unavailable, match="not through when its time was over"):
        joined.broadcast(torch.zeros(100, dtype=torch.uint8))


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]

    with pytest.raises(Unavailable):
        join(GroupSpec("gloo", "127.0.0.1", port, 1, 2, "run/1/a", 0.3))


def test_the_meeting_listens_on_its_host_alone() -> None:
    meeting = Meeting("127.0.0.1", 2, timeout_s=1)

    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", meeting.port), timeout=1)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(InvalidInput) as refused:
        Meeting("192.0.2.1", 2, timeout_s=1)

    assert refused.value.field == "transfer.host"


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(InvalidInput) as refused:
        join(GroupSpec("carrier-pigeon", "127.0.0.1", 1, 1, 2, "run/1/a", 1.0))

    assert refused.value.field == "transfer.backend"


def test_a_trainer_that_accepts_and_says_nothing_is_given_up_in_time() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        mute = GroupSpec("gloo", "127.0.0.1", silent.getsockname()[1], 1, 2, "never", 0.5)
        with pytest.raises(Unavailable, match="does not answer"):
            join(mute)

    # A thread left in the transport would abort the interpreter at its exit.
    assert [t.name for t in threading.enumerate() if t.name == "join-never"] == []


def test_hanging_up_on_one_meeting_leaves_other_connections_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("", 0)) as other:
        doomed = socket.create_connection(one.getsockname())
        spared = socket.create_connection(("127.0.0.1", other.getsockname()[1]))
        with doomed, spared:
            group._hang_up("127.0.0.1", one.getsockname()[1])

            accepted, _ = other.accept()
            with accepted:
                accepted.sendall(b"x")
                assert spared.recv(1) == b"x"
            assert doomed.recv(1) == b""


def test_who_is_ahead_of_the_rate_waits_and_who_is_behind_does_not() -> None:
    assert group.ahead_s(3000, 1.0, 1000.0) == 2.0
    assert group.ahead_s(3000, 5.0, 1000.0) == 0.0


def test_a_transfer_that_crawls_is_over_in_time_though_no_bucket_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(group, "monotonic", lambda: now[0])
    meeting = Meeting("127.0.0.1", 2, timeout_s=5)
    trainer = msgspec.structs.replace(spec(meeting, size=2, timeout_s=2.0), bucket_bytes=100)
    through: list[int] = []

    def receive() -> None:
        joined = join(msgspec.structs.replace(trainer, rank=1))
        with contextlib.suppress(Unavailable):
            joined.broadcast(torch.zeros(1000, dtype=torch.uint8))
        joined.close()

    def crawl(sent: int) -> None:
        through.append(sent)
        now[0] += 0.75

    thread = threading.Thread(target=receive)
    thread.start()
    joined = join(trainer, store=meeting.store)
    with pytest.raises(Unavailable, match="not through when its time was over"):
        joined.broadcast(torch.zeros(1000, dtype=torch.uint8), crawl)
    joined.close()
    thread.join()

    assert through == [100, 200, 300]
