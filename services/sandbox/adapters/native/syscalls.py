"""System calls that Python 3.11 does not offer, through ctypes.

Promise: each raises OSError with the kernel's errno and names the call. Standard library only.
Source of the numbers: the kernel's uapi headers and arch/*/entry/syscalls tables.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import socket
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 32, 4096, 8192, 16384, 1 << 18
MNT_DETACH = 2

_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 0x1, 0x2, 0x4
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NAME = 1, 4, 15
_PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 22, 24, 38, 47
_CAP_AMBIENT_CLEAR_ALL, _SECCOMP_MODE_FILTER = 4, 2
_CAP_LAST = 63

# chown, dac_override, fowner, fsetid, kill, setgid, setuid, setpcap, net_bind_service, chroot:
# what ordinary work as root needs; mount, mknod, ptrace, reading by handle and the rest are gone.
AGENT_CAPS = 0x405FB

_MACHINE = platform.machine()
_NUMBERS = {
    "x86_64": {"pivot_root": 155, "mount_setattr": 442},
    "aarch64": {"pivot_root": 41, "mount_setattr": 442},
}
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _number(name: str) -> int:
    try:
        return _NUMBERS[_MACHINE][name]
    except KeyError:
        raise OSError(38, f"{name}: the number of this call on {_MACHINE} is not known") from None


def unshare(flags: int) -> None:
    """Give this process new namespaces."""
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, kind: int) -> None:
    """Enter the namespace behind `fd`."""
    _check(_libc.setns(fd, kind), "setns")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    done = _libc.mount(
        source.encode(),
        os.fsencode(target),
        kind.encode() or None,
        ctypes.c_ulong(flags),
        data.encode() or None,
    )
    _check(done, f"mount {kind or 'bind'} on {target}")


def bind(source: str, target: str, *, readonly: bool = False) -> None:
    """Bind one mount (not what is mounted below it), read-only if asked."""
    mount(source, target, "", MS_BIND)
    if readonly:
        mount("", target, "", MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)


def make_tree_readonly(target: str) -> None:
    """The mount at `target` and all below it: read-only, no setuid, no devices."""
    attr = struct.pack("QQQQ", _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV, 0, 0, 0)
    done = _libc.syscall(
        ctypes.c_long(_number("mount_setattr")),
        _AT_FDCWD,
        os.fsencode(target),
        _AT_RECURSIVE,
        attr,
        ctypes.c_size_t(len(attr)),
    )
    _check(done, f"mount_setattr on {target}")


def unmount(target: str) -> None:
    """Detach `target` and all below it now; the rest goes when its last user goes."""
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount {target}")


def pivot_to(root: str) -> None:
    """Make `root` (a mount point) the root of this mount namespace and drop the old one."""
    os.chdir(root)
    _check(_libc.syscall(ctypes.c_long(_number("pivot_root")), b".", b"."), "pivot_root")
    unmount(".")
    os.chdir("/")


def die_with_parent() -> None:
    """SIGKILL this process when its parent ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl PDEATHSIG")


def set_dumpable(value: bool) -> None:
    """Whether processes of the same user may trace this one or read its memory and files."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, int(value), 0, 0, 0), "prctl DUMPABLE")


def set_name(name: str) -> None:
    """The name shown by ps; 15 bytes."""
    _check(_libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0), "prctl NAME")


def no_new_privileges() -> None:
    """exec can add no rights from here on."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl NO_NEW_PRIVS")


def drop_capabilities(keep: int) -> None:
    """Keep only the capabilities in the mask `keep`, for good."""
    for cap in range(_CAP_LAST + 1):
        if not keep >> cap & 1 and _libc.prctl(_PR_CAPBSET_DROP, cap, 0, 0, 0) != 0:
            if ctypes.get_errno() == 22:  # past the last capability that this kernel knows
                break
            _check(-1, "prctl CAPBSET_DROP")
    _libc.prctl(_PR_CAP_AMBIENT, _CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = struct.pack("Ii", 0x20080522, 0)
    low, high = keep & 0xFFFFFFFF, keep >> 32
    _check(_libc.capset(header, struct.pack("IIIIII", low, low, 0, high, high, 0)), "capset")


def install_filter(program: bytes) -> None:
    """A seccomp filter (packed sock_filter instructions) for this process and its children."""
    buffer = ctypes.create_string_buffer(program, len(program))
    packed = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, packed, 0, 0), "seccomp")


def loopback_up() -> None:
    """Set `lo` of this network namespace up: SIOCSIFFLAGS with IFF_UP."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh22x", b"lo", 1))


# Flags of openat2: no mount, no link of /proc, no link at all is crossed; nothing above the folder;
# the folder is the root of all that is followed.
RESOLVE_NO_XDEV, RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH = 1, 2, 4, 8
RESOLVE_IN_ROOT = 16


def open_beneath(folder: int, path: str, flags: int, resolve: int, mode: int = 0) -> int:
    """openat2(2): a descriptor of `path` below `folder`, or OSError where `resolve` forbids it."""
    how = struct.pack("QQQ", flags | os.O_CLOEXEC, mode, resolve)
    number = ctypes.c_long(437)  # on every machine
    done = _libc.syscall(number, folder, os.fsencode(path), how, ctypes.c_size_t(len(how)))
    if done < 0:
        found = ctypes.get_errno()
        raise OSError(found, os.strerror(found), path)
    return int(done)


def open_in_root(root: int, path: str, flags: int, mode: int = 0) -> int:
    """The same with links followed as a process whose root is `root` would, but for those that
    /proc makes of descriptors, roots and working folders: ELOOP."""
    return open_beneath(root, path, flags, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS, mode)
