"""Other processes, and what /proc tells and takes."""

from __future__ import annotations

from tests.integration.attacks.attempt import Attack

_NEIGHBOUR = """
def neighbour():
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            said = open(f"/proc/{pid}/cmdline").read()
        except OSError:
            continue
        if said.startswith("@NEIGHBOUR@"):
            return int(pid)
    raise LookupError
"""

# The kernel answers a process that may look with EFAULT for a wrong address, not with EPERM.
_READ_MEMORY = """
class Part(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("size", ctypes.c_size_t)]
into = ctypes.create_string_buffer(16)
here, there = Part(ctypes.addressof(into), 16), Part(0x1000, 16)
try:
    call(nr.process_vm_readv, {pid}, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
except OSError as error:
    assert error.errno == errno.EFAULT
"""

ATTACKS = [
    Attack("trace PID 1", ("caps",), "libc.ptrace(0x4206, 1, 0, 0)"),
    Attack("read the memory of PID 1", ("caps",), _READ_MEMORY.format(pid=1)),
    Attack("open the memory of PID 1", ("caps",), 'os.open("/proc/1/mem", os.O_RDONLY)'),
    Attack("go through the root of PID 1", ("caps",), 'os.listdir("/proc/1/root")'),
    Attack("list the descriptors of PID 1", ("caps",), 'assert os.listdir("/proc/1/fd")'),
    Attack(
        "leave the limits by a descriptor of PID 1",
        ("caps",),
        """
for number in os.listdir("/proc/1/fd"):
    try:
        os.open(f"/proc/1/fd/{number}/../init/cgroup.procs", os.O_WRONLY)
        break
    except OSError:
        pass
else:
    raise LookupError
""",
    ),
    Attack(
        "take a descriptor from PID 1",
        ("caps", "filter"),
        "call(nr.pidfd_getfd, call(nr.pidfd_open, 1, 0), 0, 0)",
    ),
    Attack("compare with PID 1", ("caps", "filter"), "call(nr.kcmp, os.getpid(), 1, 1, 0, 0)"),
    Attack(
        "read what PID 1 was started with", ("hidden",), 'assert open("/proc/1/cmdline").read()'
    ),
    Attack(
        "kill PID 1 of the box",
        ("processes",),
        """
above = open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1]
os.kill(int(above), 9)
""",
        lethal=True,
    ),
    Attack("see another box's process", ("processes",), _NEIGHBOUR + "neighbour()"),
    Attack("kill another box's process", ("processes",), _NEIGHBOUR + "os.kill(neighbour(), 9)"),
    Attack(
        "trace another box's process",
        ("processes",),
        _NEIGHBOUR + "libc.ptrace(0x4206, neighbour(), 0, 0)",
    ),
    Attack(
        "read another box's memory",
        ("processes",),
        _NEIGHBOUR + "pid = neighbour()" + _READ_MEMORY.format(pid="pid"),
    ),
    Attack(
        "enter another box's files",
        ("processes",),
        _NEIGHBOUR + 'open(f"/proc/{neighbour()}/root/app/@NEIGHBOUR@")',
    ),
    Attack(
        "write a sysctl of the host",
        ("proc",),
        # The values that are there already: the attempts themselves do no harm.
        """
name = "/proc/sys/vm/swappiness"
now = open(name).read()
open(name, "w").write(now)
""",
    ),
    Attack(
        "have crashes piped into a program",
        ("proc",),
        """
name = "/proc/sys/kernel/core_pattern"
now = open(name).read()
open(name, "w").write(now)
""",
    ),
    Attack(
        "press a magic key",
        ("proc", "masks"),
        """
import stat
assert stat.S_ISREG(os.stat("/proc/sysrq-trigger").st_mode)
open("/proc/sysrq-trigger", "w").write("h")
""",
    ),
    Attack("read the kernel's symbols", ("masks",), 'assert open("/proc/kallsyms").readline()'),
    Attack("read keys in use", ("masks",), 'assert open("/proc/key-users").read()'),
    Attack("read how the host was booted", ("masks",), 'assert open("/proc/cmdline").read()'),
    Attack("read the kernel's timers", ("masks",), 'assert open("/proc/timer_list").readline()'),
    Attack("see devices' drivers", ("masks",), 'assert os.listdir("/proc/fs")'),
    Attack(
        "be spared by the memory limit",
        ("proc",),
        'open("/proc/self/oom_score_adj", "w").write("-1000")',
    ),
    Attack(
        "use a leaked descriptor to leave the limits",
        ("descriptors",),
        """
for number in os.listdir("/proc/self/fd"):
    try:
        os.open(f"/proc/self/fd/{number}/../init/cgroup.procs", os.O_WRONLY)
        break
    except OSError:
        pass
else:
    raise LookupError
""",
    ),
    Attack(
        "hold a descriptor that it was not given",
        ("descriptors",),
        # One more: the listing's own.
        'assert len(os.listdir("/proc/self/fd")) > 4',
    ),
    Attack(
        "read the host's shared memory",
        ("ipc",),
        """
_libc.shmat.restype = ctypes.c_void_p
at = _libc.shmat(libc.shmget(@SHARED@, 0, 0), None, 0o10000)
assert ctypes.string_at(at, 4) == b"host"
""",
    ),
    Attack("read /etc/shadow of the host", ("skeleton",), 'assert open("/etc/shadow").read()'),
    Attack("read /root of the host", ("skeleton",), 'assert os.listdir("/root")'),
    Attack(
        "read the service's own folder",
        ("skeleton",),
        'assert open("@FILE@").read() == "@TOKEN@"',
    ),
]
