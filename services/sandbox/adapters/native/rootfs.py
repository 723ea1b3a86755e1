"""The file system of a box: what it starts from, a layer of its own, and what must not be seen.

Owns: the base `host` (a skeleton and the host's read-only /usr, built once a keeper in its private
tmpfs) and the mounts of one box. Promise: of the host nothing is visible but that /usr; /proc is
read-only and its sensitive entries are masked; /sys is absent. Every folder that something is
mounted on is made in the box's fresh layer first, so no link that a layer below holds is followed.
In a verifier's box everything that decides what code runs (/bin, /lib*, /sbin, /usr, /etc, /dev,
/proc, /run) is what the box started from, its base and set-up, whatever the agent left; /tests and
/logs are empty. So a task's answer cannot lie in /etc or /usr. Standard library only.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass

from services.sandbox.adapters import steering
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
# What something is mounted on; and in a verifier: what is taken from below the agent, and emptied.
_MADE = {"dev": 0o755, "proc": 0o555, "run": 0o755, STATE_DIR: 0o700}
_TRUSTED = ("usr", "etc", *_CODE)
_NEEDED = {"tmp": 0o1777, "root": 0o700}
_EMPTIED = ("dev", "proc", "run", "sys", "tests", "logs")
_QUIET = {"nosuid": sc.MS_NOSUID, "nodev": sc.MS_NODEV}


@dataclass(frozen=True)
class Base:
    """A root file system below the stage; `bound`: its folders that are mounts of their own."""

    folder: str
    bound: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layers:
    """What one box is mounted from, as relative paths; layers by `:`, the top first.

    verdict: a verifier's own folder, else empty. trusted: for a verifier, the layers (the base
    among them) that its tools come from; `view` is a folder to mount these on.
    """

    root: str
    lower: str
    upper: str
    work: str
    verdict: str = ""
    trusted: str = ""
    view: str = ""


def build_base(base: str) -> Base:
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
    return Base(base, ("usr", *_code_folders()))


def mount_box(base: Base, layers: Layers, defences: frozenset[str]) -> None:
    """All mounts of one box below `layers.root`, in the caller's own mount namespace."""
    root = layers.root
    quiet = sum(flag for name, flag in _QUIET.items() if name in defences)
    view = _mount_trusted(layers) if layers.trusted else ""
    if view:
        _prepare_verifier(layers.upper, view, base)
    _prepare(layers.upper, base)
    own = f",upperdir={layers.upper},workdir={layers.work}"
    sc.mount("overlay", root, "overlay", quiet, overlay_options(layers.lower, own))
    for name in base.bound:
        source = os.path.join(base.folder, name)
        sc.mount(source, os.path.join(root, name), "", sc.MS_BIND | sc.MS_REC)
    _mount_dev(os.path.join(root, "dev"))
    _mount_proc(os.path.join(root, "proc"), defences)
    state = os.path.join(root, STATE_DIR)
    sc.mount("tmpfs", state, "tmpfs", sc.MS_NOSUID | sc.MS_NODEV | sc.MS_NOEXEC, _STATE_OPTIONS)
    for name in [name for name in _TRUSTED if view and name not in base.bound]:
        if _is_folder(os.path.join(view, name)):
            sc.bind(os.path.join(view, name), os.path.join(root, name), readonly=True)
    if layers.verdict:
        sc.bind(layers.verdict, os.path.join(root, "logs", "verifier"))


def _mount_trusted(layers: Layers) -> str:
    """Where the trusted layers are to be seen as one, read-only."""
    if ":" not in layers.trusted:
        return layers.trusted
    flags = sc.MS_RDONLY | sc.MS_NOSUID | sc.MS_NODEV
    sc.mount("overlay", layers.view, "overlay", flags, overlay_options(layers.trusted))
    return layers.view


def overlay_options(lower: str, own: str = "") -> str:
    """For mount(2); raises OSError for more than it takes, which it would cut off unsaid."""
    options = f"lowerdir={lower}{own},index=off,metacopy=off,redirect_dir=off,xino=off"
    if len(os.fsencode(options)) >= os.sysconf("SC_PAGE_SIZE"):
        raise OSError(errno.E2BIG, "too many layers for one mount: squash the snapshot first")
    return options


def _prepare(upper: str, base: Base) -> None:
    """Plain folders in a fresh layer where something is mounted, over whatever lies below."""
    for name, mode in (_MADE | dict.fromkeys(base.bound, 0o755)).items():
        path = os.path.join(upper, name)
        if not os.path.lexists(path):
            os.mkdir(path)
            os.chmod(path, mode)


def _prepare_verifier(upper: str, view: str, base: Base) -> None:
    """Fill a fresh layer so that it hides everything of the agent's that decides what runs."""
    for name in _TRUSTED:
        path, own = os.path.join(upper, name), os.path.join(view, name)
        if name in base.bound or _is_folder(own):
            _make_opaque(path)
        elif os.path.islink(own):
            os.symlink(os.readlink(own), path)
        else:
            os.mknod(path, stat.S_IFCHR, 0)  # a whiteout: the agent may have made one
    for name in steering.NAMES:
        os.mknod(os.path.join(upper, name), stat.S_IFCHR, 0)
    for name in _EMPTIED:
        _make_opaque(os.path.join(upper, name))
    for name, mode in _NEEDED.items():
        if not os.path.lexists(os.path.join(view, name)):
            os.mkdir(os.path.join(upper, name))
            os.chmod(os.path.join(upper, name), mode)
    os.mkdir(os.path.join(upper, "logs", "verifier"))


def _make_opaque(path: str) -> None:
    os.mkdir(path)
    os.setxattr(path, "trusted.overlay.opaque", b"y")


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


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


def _mount_proc(proc: str, defences: frozenset[str]) -> None:
    quiet = sc.MS_NOSUID | sc.MS_NODEV | sc.MS_NOEXEC
    # PID 1 keeps rights that the agent lacks, so it does not show. Members of `gid` see all: the
    # default, 0, is the agent's own.
    hidden = "hidepid=2,gid=65534" if "hidden" in defences else "hidepid=0"
    sc.mount("proc", proc, "proc", quiet, hidden)
    masked = "masks" in defences
    for name in _MASKED_FILES if masked else ():
        if os.path.exists(os.path.join(proc, name)):
            sc.bind("/dev/null", os.path.join(proc, name))
    for name in _MASKED_FOLDERS if masked else ():
        if os.path.isdir(os.path.join(proc, name)):
            sc.mount("tmpfs", os.path.join(proc, name), "tmpfs", quiet | sc.MS_RDONLY, "size=0")
    if "proc" in defences:
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
