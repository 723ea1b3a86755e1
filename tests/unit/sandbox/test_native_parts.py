"""The pure parts of native boxes: cgroup discovery, output spool, frames, the call filter."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.sandbox.adapters.native import seccomp, wire
from services.sandbox.adapters.native.cgroups import CgroupTrouble, find
from services.sandbox.adapters.native.spool import Spool


def mount(kind: str, point: str, options: str, root: str = "/") -> str:
    return f"30 25 0:26 {root} {point} rw,nosuid shared:4 - {kind} {kind} {options}"


V2 = mount("cgroup2", "/sys/fs/cgroup", "rw")
HYBRID = "\n".join(
    [
        mount("cgroup2", "/sys/fs/cgroup/unified", "rw"),
        mount("cgroup", "/sys/fs/cgroup/memory", "rw,memory"),
        mount("cgroup", "/sys/fs/cgroup/pids", "rw,pids"),
        mount("cgroup", "/sys/fs/cgroup/cpu", "rw,cpu,cpuacct"),
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw",
    ]
)


def test_a_pure_v2_host_kills_and_limits_in_one_tree() -> None:
    found = find(V2, "0::/system.slice/muster.service\n", "cpu memory pids")
    assert found.kill == found.memory == found.pids
    assert found.kill.directory == "/sys/fs/cgroup/system.slice/muster.service"
    assert found.all == [found.kill]


def test_a_hybrid_host_kills_in_v2_and_limits_in_v1_below_its_own_group() -> None:
    found = find(HYBRID, "8:pids:/\n4:memory:/job/a\n0::/\n", "hugetlb")
    assert found.kill.directory == "/sys/fs/cgroup/unified"
    assert found.memory.directory == "/sys/fs/cgroup/memory/job/a"
    assert found.pids.directory == "/sys/fs/cgroup/pids"
    assert (found.kill.v2, found.memory.v2, found.pids.v2) == (True, False, False)


def test_a_container_s_mount_shows_only_its_own_part() -> None:
    line = mount("cgroup2", "/sys/fs/cgroup", "rw", root="/docker/abc")
    found = find(line, "0::/docker/abc/inner\n", "memory pids")
    assert found.kill.directory == "/sys/fs/cgroup/inner"


@pytest.mark.parametrize(
    ("mounts", "controllers", "missing"),
    [("", "", "cgroup2"), (V2, "memory", "pids"), (V2, "pids", "memory")],
)
def test_what_is_missing_is_named_with_a_way_out(
    mounts: str, controllers: str, missing: str
) -> None:
    with pytest.raises(CgroupTrouble, match=missing) as caught:
        find(mounts, "0::/\n", controllers)
    assert "mount" in caught.value.way_out


@given(st.lists(st.binary(max_size=40)), st.integers(1, 50))
def test_a_spool_keeps_both_ends_of_anything(parts: list[bytes], limit: int) -> None:
    spool = Spool(limit)
    for part in parts:
        spool.add(part)
    whole = b"".join(parts)
    assert spool.total == len(whole)
    if len(whole) <= limit:
        assert spool.head + spool.tail == whole
    else:
        assert spool.head == whole[: limit // 2]
        assert spool.tail == whole[len(whole) - (limit - limit // 2) :]


def test_frames_are_bounded_before_they_are_read() -> None:
    frame = wire.encode({"op": "x"}, b"blob")
    assert wire.sizes(frame[: wire.PREFIX.size]) == (len(frame) - 8 - 4, 4)
    with pytest.raises(wire.ProtocolError):
        wire.sizes(struct.pack("<II", 1 << 30, 0))
    with pytest.raises(wire.ProtocolError):
        wire.encode({}, b"x" * (wire.BLOB_MAX + 1))
    for nonsense in (b"", b"[1]", b"{", b"\xff"):
        with pytest.raises(wire.ProtocolError):
            wire.decode(nonsense)


ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000


def decide(program: bytes, number: int, arch: int, first: int = 0, second: int = 0) -> int:
    """A small interpreter of the few instructions that the filter uses."""
    data = struct.pack("IIQQQ", number, arch, 0, first, second)
    at, value = 0, 0
    while True:
        code, if_true, if_false, k = struct.unpack_from("HBBI", program, at * 8)
        at += 1
        if code == 0x20:
            value = struct.unpack_from("I", data, k)[0]
        elif code == 0x06:
            return int(k)
        else:
            true = {0x15: value == k, 0x45: bool(value & k), 0x35: value >= k}[code]
            at += if_true if true else if_false


@pytest.mark.parametrize(
    ("machine", "arch", "mount_call", "clone", "read"),
    [("x86_64", 0xC000003E, 165, 56, 0), ("aarch64", 0xC00000B7, 40, 220, 63)],
)
def test_the_filter_denies_what_it_lists(
    machine: str, arch: int, mount_call: int, clone: int, read: int
) -> None:
    program = seccomp.program(machine)
    assert program is not None
    assert decide(program, mount_call, arch) == EPERM
    assert decide(program, clone, arch, 0x10000000) == EPERM
    assert decide(program, clone, arch, 0x01200011) == ALLOW
    assert decide(program, read, arch, 0x10000000) == ALLOW
    assert decide(program, 435, arch) == ENOSYS
    socket_call = {"x86_64": 41, "aarch64": 198}[machine]
    answers = [decide(program, socket_call, arch, family) for family in (1, 2, 10, 16, 17, 38, 40)]
    assert answers == [ALLOW] * 4 + [0x00050061] * 3
    assert decide(program, read, 0x40000003) == KILL
    assert decide(program, read | 0x40000000, arch) == ENOSYS


@pytest.mark.parametrize(
    ("machine", "column", "arch"), [("x86_64", 0, 0xC000003E), ("aarch64", 1, 0xC00000B7)]
)
def test_every_call_of_the_list_is_denied_and_no_other(
    machine: str, column: int, arch: int
) -> None:
    program = seccomp.program(machine)
    assert program is not None
    numbers = {both[column] for both in seccomp.DENIED.values()} - {-1}
    denied = {number for number in range(600) if decide(program, number, arch) == EPERM}
    assert denied == numbers


@pytest.mark.parametrize(
    ("machine", "arch", "ioctl"), [("x86_64", 0xC000003E, 16), ("aarch64", 0xC00000B7, 29)]
)
def test_nobody_types_into_a_terminal(machine: str, arch: int, ioctl: int) -> None:
    program = seccomp.program(machine)
    assert program is not None
    for request in (0x5412, 0x541C, 0x5423, 0xFFFF_FFFF_0000_5412):  # the kernel takes the low half
        assert decide(program, ioctl, arch, 0, request) == EPERM
    assert decide(program, ioctl, arch, 0, 0x5401) == ALLOW
    assert decide(program, ioctl, arch, 0x5412, 0) == ALLOW
    assert decide(program, ioctl + 1, arch, 0, 0x5412) == ALLOW


def test_an_unknown_machine_has_no_filter() -> None:
    assert seccomp.program("mips") is None
