"""The file system of a box: a skeleton, the host's read-only /usr, and what must not be seen.

Owns: the base (built once a keeper, in its private tmpfs) and the mounts of one box. Promise:
nothing of the host is visible but /usr; /proc is read-only and its sensitive entries are masked;
/sys is absent. In a verifier's box everything that decides what code runs (/bin, /lib*, /sbin,
/usr, /etc, /dev, /proc, /run) is the base's own whatever the agent left, and so are /tests and
/logs: they are made in the fresh upper layer, opaque, before anything is mounted, so no link
of the agent's is ever followed. So a task's answer cannot lie in /etc. Standard library only.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

from services.sandbox.adapters.native import syscalls as sc

_PASSWD = "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n"
_ETC = {
    "passwd": _PASSWD,
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost box\n",
    "hostname": "box\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "profile": "",
    "resolv.conf": "",
}
_FOLDERS = {
    "dev": 0o755, "etc": 0o755, "home": 0o755, "mnt": 0o755, "opt": 0o755, "proc": 0o555,
    "root": 0o700, "run": 0o755, "srv": 0o755, "tmp": 0o1777, "usr": 0o755, "var": 0o755,
    "var/tmp": 0o1777, "var/log": 0o755, "var/lib": 0o755, "logs": 0o755,
}  # fmt: skip
_CODE = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9)}
_DEV_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
_MASKED_FILES = ("cmdline", "kcore", "keys", "key-users", "kmsg", "sysrq-trigger", "timer_list",
                 "latency_stats", "kallsyms", "kpagecount", "kpageflags", "sched_debug",
                 "modules")  # fmt: skip
_MASKED_FOLDERS = ("acpi", "asound", "bus", "driver", "fs", "irq", "scsi", "tty")
STATE_DIR = "run/muster"
_STATE_OPTIONS = "size=512k,nr_inodes=16,mode=0700"


@dataclass(frozen=True)
class Layers:
    """What one box is mounted from; `verdict` is a verifier's own directory, else empty."""

    root: str
    lower: str
    upper: str
    work: str
    verdict: str = ""


def build_base(base: str) -> None:
    """The skeleton below `base`, with the host's /usr bound read-only."""
    os.makedirs(base)
    os.chmod(base, 0o755)
    for name, mode in _FOLDERS.items():
        os.mkdir(os.path.join(base, name))
        os.chmod(os.path.join(base, name), mode)
    for name, text in _ETC.items():
        with open(os.path.join(base, "etc", name), "w", encoding="utf-8") as file:
            file.write(text)
    _copy_links("/etc/alternatives", os.path.join(base, "etc", "alternatives"))
    os.symlink("/proc/self/mounts", os.path.join(base, "etc", "mtab"))
    _add_code_links(base)
    for name in ("usr", *_code_folders()):
        target = os.path.join(base, name)
        os.makedirs(target, exist_ok=True)
        sc.mount("/" + name, target, "", sc.MS_BIND | sc.MS_REC)
        sc.make_tree_readonly(target)


def prepare_verifier(upper: str) -> None:
    """Fill a fresh upper so that it hides everything of the agent's that decides what runs."""
    _add_code_links(upper)
    for name in ("usr", "etc", "dev", "proc", "run", "sys", "tests", "logs", *_code_folders()):
        path = os.path.join(upper, name)
        os.mkdir(path)
        os.setxattr(path, "trusted.overlay.opaque", b"y")
    os.mkdir(os.path.join(upper, "logs", "verifier"))


def mount_box(base: str, layers: Layers, *, proc_readonly: bool = True) -> None:
    """All mounts of one box below `layers.root`, in the caller's own mount namespace."""
    root = layers.root
    options = (
        f"lowerdir={layers.lower},upperdir={layers.upper},workdir={layers.work},"
        "index=off,metacopy=off,redirect_dir=off,xino=off"
    )
    sc.mount("overlay", root, "overlay", sc.MS_NOSUID | sc.MS_NODEV, options)
    for name in ("usr", *_code_folders()):
        sc.mount(os.path.join(base, name), os.path.join(root, name), "", sc.MS_BIND | sc.MS_REC)
    _mount_dev(os.path.join(root, "dev"))
    _mount_proc(os.path.join(root, "proc"), proc_readonly)
    state = os.path.join(root, STATE_DIR)
    os.makedirs(state, exist_ok=True)
    sc.mount("tmpfs", state, "tmpfs", sc.MS_NOSUID | sc.MS_NODEV | sc.MS_NOEXEC, _STATE_OPTIONS)
    if layers.verdict:
        sc.bind(os.path.join(base, "etc"), os.path.join(root, "etc"), readonly=True)
        sc.bind(layers.verdict, os.path.join(root, "logs", "verifier"))


def _mount_dev(dev: str) -> None:
    quiet = sc.MS_NOSUID | sc.MS_NOEXEC
    sc.mount("tmpfs", dev, "tmpfs", quiet, "size=64k,nr_inodes=32,mode=0755")
    for name, (major, minor) in _DEVICES.items():
        path = os.path.join(dev, name)
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(major, minor))
        os.chmod(path, 0o666)
    for name, target in _DEV_LINKS.items():
        os.symlink(target, os.path.join(dev, name))
    os.mkdir(os.path.join(dev, "shm"))
    # Read-only, so that nobody removes /dev/null; devices still take writes.
    sc.mount("", dev, "", sc.MS_BIND | sc.MS_REMOUNT | sc.MS_RDONLY | quiet)
    shm = os.path.join(dev, "shm")
    sc.mount("tmpfs", shm, "tmpfs", quiet | sc.MS_NODEV, "size=8m,nr_inodes=256,mode=1777")


def _mount_proc(proc: str, readonly: bool) -> None:
    quiet = sc.MS_NOSUID | sc.MS_NODEV | sc.MS_NOEXEC
    # PID 1 keeps rights that the agent lacks, so it does not show. Members of `gid` see all: the
    # default, 0, is the agent's own.
    sc.mount("proc", proc, "proc", quiet, "hidepid=2,gid=65534")
    for name in _MASKED_FILES:
        if os.path.exists(os.path.join(proc, name)):
            sc.bind("/dev/null", os.path.join(proc, name))
    for name in _MASKED_FOLDERS:
        if os.path.isdir(os.path.join(proc, name)):
            sc.mount("tmpfs", os.path.join(proc, name), "tmpfs", quiet | sc.MS_RDONLY, "size=0")
    if readonly:
        sc.mount("", proc, "", sc.MS_BIND | sc.MS_REMOUNT | sc.MS_RDONLY | quiet)


def _code_folders() -> list[str]:
    """Top-level code folders that are real folders here (hosts without a merged /usr)."""
    return [n for n in _CODE if os.path.isdir(f"/{n}") and not os.path.islink(f"/{n}")]


def _add_code_links(root: str) -> None:
    for name in _CODE:
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), os.path.join(root, name))


def _copy_links(source: str, target: str) -> None:
    """Debian's commands are links into /etc/alternatives: take the links, no files."""
    if not os.path.isdir(source):
        return
    os.mkdir(target)
    for entry in os.scandir(source):
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), os.path.join(target, entry.name))
