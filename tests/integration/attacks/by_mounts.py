"""Ways out of the box's file system: mounts, roots, handles, devices."""

from __future__ import annotations

from tests.integration.attacks.attempt import Attack

_BOTH = ("caps", "filter")
_NEW_NS, _NEW_USER = 0x20000, 0x10000000

_UP = """
os.mkdir("/in")
up = os.open("/", os.O_RDONLY)
os.chroot("/in")
os.fchdir(up)
for _ in range(30):
    os.chdir("..")
"""
# Handle of a file system's inode 2, the root of ext4: type 1, 32 bits of number and generation.
_BY_HANDLE = """
usr = os.open("/usr/bin", os.O_RDONLY)
handle = struct.pack("IiII", 8, 1, 2, 0)
root = call(nr.open_by_handle_at, usr, handle, os.O_RDONLY)
assert "usr" in os.listdir(root)
"""
_NODE = """
os.mknod("/app/node", {kind} | 0o600, os.makedev({number}))
os.open("/app/node", {how})
"""


def _node(name: str, number: str, how: str, kind: str = "0o020000") -> Attack:
    body = _NODE.format(number=number, how=how, kind=kind)
    return Attack(name, ("caps", "nodev"), body)


ATTACKS = [
    Attack("mount", _BOTH, 'libc.mount(b"x", b"/mnt", b"tmpfs", 0, None)'),
    Attack(
        "mount in a user namespace of one's own",
        ("filter",),
        f'libc.unshare({_NEW_USER | _NEW_NS}); libc.mount(b"x", b"/mnt", b"tmpfs", 0, None)',
    ),
    Attack(
        "mount with the new calls",
        _BOTH,
        """
system = call(nr.fsopen, b"tmpfs", 0)
call(nr.fsconfig, system, 6, None, None, 0)
made = call(nr.fsmount, system, 0, 0)
call(nr.move_mount, made, b"", -100, b"/mnt", 4)
open("/mnt/file", "w")
""",
    ),
    Attack("clone a mount", _BOTH, 'call(nr.open_tree, -100, b"/", 0x8001)'),
    Attack(
        "make /usr writable by a remount",
        _BOTH,
        'libc.mount(None, b"/usr", None, 32 | 4096, None); assert os.access("/usr", os.W_OK)',
    ),
    Attack(
        "make /usr writable by mount_setattr",
        _BOTH,
        """
attributes = struct.pack("QQQQ", 0, 1, 0, 0)
call(nr.mount_setattr, -100, b"/usr", 0, attributes, len(attributes))
assert os.access("/usr", os.W_OK)
""",
    ),
    Attack(
        "take a mask off /proc",
        _BOTH,
        'libc.umount2(b"/proc/kallsyms", 2); assert open("/proc/kallsyms").readline()',
    ),
    Attack(
        "pivot_root",
        _BOTH,
        'os.mkdir("/dev/shm/old"); call(nr.pivot_root, b"/dev/shm", b"/dev/shm/old")',
    ),
    Attack(
        "leave the root by chroot",
        ("pivot",),
        _UP + 'assert open("@FILE@"[1:]).read() == "@TOKEN@"',
    ),
    Attack(
        "reach a daemon's socket by chroot, as docker.sock",
        ("pivot",),
        _UP
        + 'with socket.socket(socket.AF_UNIX) as s: s.connect("@SOCKET@"[1:]); assert s.recv(9)',
    ),
    Attack(
        "mount /sys",
        _BOTH,
        'libc.mount(b"x", b"/mnt", b"sysfs", 0, None); os.listdir("/mnt/class")',
    ),
    Attack(
        "write a release_agent",
        _BOTH,
        # The agent that is there already (none): the attempt itself does no harm.
        """
libc.mount(b"x", b"/mnt", b"cgroup", 0, b"@HIERARCHY@")
now = open("/mnt/release_agent").read()
open("/mnt/release_agent", "w").write(now or "\\n")
""",
    ),
    Attack(
        "make a control group without limits",
        _BOTH,
        """
libc.mount(b"x", b"/mnt", b"cgroup2", 0, None)
os.mkdir("/mnt/@TOKEN@")
try:
    open("/mnt/@TOKEN@/cgroup.procs", "w").write("0")
finally:
    open("/mnt/cgroup.procs", "w").write("0")
    os.rmdir("/mnt/@TOKEN@")
""",
    ),
    Attack(
        "type into a terminal",
        _BOTH,
        """
libc.mount(b"x", b"/mnt", b"devpts", 0, b"newinstance,ptmxmode=0666")
master = os.open("/mnt/ptmx", os.O_RDWR | os.O_NOCTTY)
fcntl.ioctl(master, 0x40045431, struct.pack("i", 0))
os.setsid()
terminal = os.open("/mnt/0", os.O_RDWR)
fcntl.ioctl(terminal, 0x540E, 0)
fcntl.ioctl(terminal, 0x5412, b"\\n")
assert os.read(terminal, 1) == b"\\n"
""",
    ),
    Attack("open the host's root by its file handle", _BOTH, _BY_HANDLE),
    Attack(
        "learn file handles",
        ("filter",),
        """
handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0), 136)
call(nr.name_to_handle_at, -100, b"/usr", handle, ctypes.create_string_buffer(4), 0)
""",
    ),
    Attack(
        "mark a folder for overlayfs",
        ("caps",),
        'os.mkdir("/app/x"); os.setxattr("/app/x", "trusted.overlay.opaque", b"y")',
    ),
    Attack("enter a namespace", _BOTH, 'libc.setns(os.open("/proc/self/ns/uts", 0), 0)'),
    Attack("a mount namespace of one's own", ("caps",), f"libc.unshare({_NEW_NS})"),
    Attack("a user namespace by unshare", ("filter",), f"libc.unshare({_NEW_USER})"),
    Attack(
        "a user namespace by clone",
        ("filter",),
        f"""
if call(nr.clone, {_NEW_USER} | 17, 0, 0, 0, 0) == 0:
    os._exit(0)
""",
    ),
    Attack(
        "a user namespace by clone3",
        ("filter",),
        f"""
if call(nr.clone3, struct.pack("11Q", {_NEW_USER}, 0, 0, 0, 17, *[0] * 6), 88) == 0:
    os._exit(0)
""",
    ),
    _node("open a disk of the host", "@DISK@", "os.O_RDONLY | os.O_NONBLOCK", "0o060000"),
    _node("open the kernel's memory", "1, 1", "os.O_RDONLY"),
    _node("read the kernel's log by its device", "1, 11", "os.O_RDONLY | os.O_NONBLOCK"),
    _node("open the machine's virtualisation", "10, 232", "os.O_RDWR"),
    _node("open FUSE", "10, 229", "os.O_RDWR"),
    _node("open loop-control", "10, 237", "os.O_RDWR"),
    Attack(
        "become root again by a set-uid program",
        ("privileges", "nosuid"),
        """
import shutil
shutil.copy("/usr/bin/python3", "/app/again")
os.chmod("/app/again", 0o4755)
os.chmod("/app", 0o755)
os.setgid(65534)
os.setuid(65534)
again = "import os, sys; sys.exit(0 if os.geteuid() == 0 else 1)"
os.execv("/app/again", ["again", "-I", "-c", again])
""",
    ),
]
