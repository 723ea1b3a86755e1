"""The system calls that no process of an agent may make.

Owns: one deny list as a BPF program. It covers what dropping capabilities does not: with a new
user namespace a process would get every capability back inside it, and with it kernel code that
was written for administrators; and through some socket families it would reach past an empty
network namespace. Promise: pure; denied calls fail with EPERM, clone3 with ENOSYS
(its flags lie in memory, where no filter sees them; libc then falls back to clone).
Does not cover: machines other than x86_64 and aarch64 (`program` answers None, the host check
says so). Numbers: arch/x86/entry/syscalls/syscall_64.tbl and asm-generic/unistd.h.
"""

from __future__ import annotations

import struct

_CLONE_NEWUSER = 0x10000000
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_UNSHARE = {"x86_64": 272, "aarch64": 97}
_CLONE3 = 435
_SOCKET = {"x86_64": 41, "aarch64": 198}
# AF_UNIX, AF_INET, AF_INET6, AF_NETLINK: a network namespace confines these. It does not confine
# AF_VSOCK, which reaches the host of a virtual machine from any namespace.
_FAMILIES = (1, 2, 10, 16)
# name: (x86_64, aarch64)
_DENIED = {
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
}
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_EPERM, _ENOSYS, _EAFNOSUPPORT = 0x00050001, 0x00050026, 0x00050061
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
    for numbers in _DENIED.values():
        code += [_op(_EQUAL, numbers[column], 0, 1), _op(_RETURN, _EPERM)]
    for number in (_CLONE[machine], _UNSHARE[machine]):
        # Both take their flags as the first argument (its low half: little endian).
        code += [
            _op(_EQUAL, number, 0, 3),
            _op(_LOAD, 16),
            _op(_BITS, _CLONE_NEWUSER, 0, 1),
            _op(_RETURN, _EPERM),
            _op(_LOAD, 0),
        ]
    code += _only_families(_SOCKET[machine])
    code.append(_op(_RETURN, _ALLOW))
    return b"".join(code)


def _only_families(number: int) -> list[bytes]:
    count = len(_FAMILIES)
    allowed = [_op(_EQUAL, f, count - at, 0) for at, f in enumerate(_FAMILIES)]
    return [
        _op(_EQUAL, number, 0, count + 2),
        _op(_LOAD, 16),
        *allowed,
        _op(_RETURN, _EAFNOSUPPORT),
        _op(_LOAD, 0),
    ]


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
