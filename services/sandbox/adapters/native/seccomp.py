"""The system calls that no process of an agent may make.

Owns: one deny list as a BPF program. It covers what dropping capabilities does not: with a new
user namespace a process would get every capability back inside it, and with it kernel code that
was written for administrators; through some socket families it would reach past an empty network
namespace; large parts of the kernel (io_uring, bpf, perf, keys, userfaultfd) are no part of
anybody's task. Most other calls in it need a capability too: two defences, each proven alone
(tests/integration/attacks). Promise: pure; denied calls fail with EPERM, clone3 with ENOSYS
(its flags lie in memory, where no filter sees them; libc then falls back to clone).
Does not cover: machines other than x86_64 and aarch64 (`program` answers None, the host check
says so). Numbers: arch/x86/entry/syscalls/syscall_64.tbl and asm-generic/unistd.h.
"""

from __future__ import annotations

import struct
from typing import Any

_CLONE_NEWUSER = 0x10000000
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_UNSHARE = {"x86_64": 272, "aarch64": 97}
_CLONE3 = 435
_SOCKET = {"x86_64": 41, "aarch64": 198}
# AF_UNIX, AF_INET, AF_INET6, AF_NETLINK: a network namespace confines these. It does not confine
# AF_VSOCK, which reaches the host of a virtual machine from any namespace.
_FAMILIES = (1, 2, 10, 16)
_IOCTL = {"x86_64": 16, "aarch64": 29}
# TIOCSTI types into a terminal, TIOCLINUX reads and pastes on a console, TIOCSETD loads a line
# discipline. The kernel looks at the low half of the request only, as the filter does.
_IOCTLS = (0x5412, 0x541C, 0x5423)
# name: (x86_64, aarch64); -1 where a machine has no such call
DENIED = {
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "setns": (308, 268),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "init_module": (175, 105),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "perf_event_open": (298, 241),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "syslog": (103, 116),
    "iopl": (172, -1),
    "ioperm": (173, -1),
    "vhangup": (153, 58),
    "lookup_dcookie": (212, 18),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
}
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_EPERM, _ENOSYS, _EAFNOSUPPORT = 0x00050001, 0x00050026, 0x00050061
_FIRST, _SECOND = 16, 24  # where the arguments of a call lie
_LOAD, _EQUAL, _BITS, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_X32 = 0x40000000  # the second calling convention of x86_64: other numbers, so none of it


def program(machine: str) -> bytes | None:
    """The filter for `machine`, or None where its numbers are not known here."""
    if machine not in _AUDIT_ARCH:
        return None
    column = 0 if machine == "x86_64" else 1
    code = [
        _op(_LOAD, 4),
        _op(_EQUAL, _AUDIT_ARCH[machine], 1, 0),
        _op(_RETURN, _KILL),
        _op(_LOAD, 0),
        _op(_AT_LEAST, _X32, 0, 1),
        _op(_RETURN, _ENOSYS),
        _op(_EQUAL, _CLONE3, 0, 1),
        _op(_RETURN, _ENOSYS),
    ]
    for number in sorted({numbers[column] for numbers in DENIED.values()} - {-1}):
        code += [_op(_EQUAL, number, 0, 1), _op(_RETURN, _EPERM)]
    for number in (_CLONE[machine], _UNSHARE[machine]):
        code += _without(number, _FIRST, _BITS, _CLONE_NEWUSER)
    for request in _IOCTLS:
        code += _without(_IOCTL[machine], _SECOND, _EQUAL, request)
    code += _only_families(_SOCKET[machine])
    code.append(_op(_RETURN, _ALLOW))
    return b"".join(code)


def _without(number: int, argument: int, test: int, value: int) -> list[bytes]:
    """Deny call `number` when its argument (the low half: little endian) passes `test`."""
    return [
        _op(_EQUAL, number, 0, 4),
        _op(_LOAD, argument),
        _op(test, value, 0, 1),
        _op(_RETURN, _EPERM),
        _op(_LOAD, 0),
    ]


def _only_families(number: int) -> list[bytes]:
    count = len(_FAMILIES)
    allowed = [_op(_EQUAL, f, count - at, 0) for at, f in enumerate(_FAMILIES)]
    return [
        _op(_EQUAL, number, 0, count + 2),
        _op(_LOAD, _FIRST),
        *allowed,
        _op(_RETURN, _EAFNOSUPPORT),
        _op(_LOAD, 0),
    ]


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def profile(machine: str) -> dict[str, Any] | None:
    """The same list as a container engine's seccomp profile (its own lets io_uring, other socket
    families and 32-bit calls pass); None where `program` is.

    Calls by another convention than the machine's own are none of `architectures`: they kill.
    """
    if machine not in _AUDIT_ARCH:
        return None
    column = 0 if machine == "x86_64" else 1
    others = [*(f for f in range(max(_FAMILIES)) if f not in _FAMILIES)]
    rules = [
        _rule([name for name, both in DENIED.items() if both[column] >= 0]),
        _rule(["clone3"], errno=_ENOSYS & 0xFFFF),
        _rule(["clone", "unshare"], 0, "MASKED_EQ", _CLONE_NEWUSER, _CLONE_NEWUSER),
        *(_rule(["ioctl"], 1, "MASKED_EQ", 0xFFFFFFFF, request) for request in _IOCTLS),
        *(_rule(["socket"], 0, "EQ", family) for family in others),
        _rule(["socket"], 0, "GT", max(_FAMILIES)),
    ]
    arch = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}[machine]
    return {"defaultAction": "SCMP_ACT_ALLOW", "architectures": [arch], "syscalls": rules}


def _rule(
    names: list[str], index: int = 0, test: str = "", value: int = 0, two: int = 0, errno: int = 1
) -> dict[str, Any]:
    given = {"index": index, "value": value, "valueTwo": two, "op": f"SCMP_CMP_{test}"}
    rule = {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": errno}
    return rule | ({"args": [given]} if test else {})
