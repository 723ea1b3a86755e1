"""Calls that reach the kernel that all boxes share, or its settings."""

from __future__ import annotations

import platform

from tests.integration.attacks.attempt import Attack

_BOTH = ("caps", "filter")
_NEW_USER = 0x10000000

ATTACKS = [
    Attack(
        "load a BPF program's map",
        _BOTH,
        'made = struct.pack("IIIII", 1, 4, 4, 1, 0); call(nr.bpf, 0, made, len(made))',
    ),
    Attack(
        "watch with perf",
        ("filter",),
        # Its own processor clock, without the kernel's part: open to everyone.
        """
wanted = struct.pack("IIQQQQQ", 1, 112, 0, 0, 0, 0, 0b1100000) + bytes(64)
call(nr.perf_event_open, wanted, 0, -1, -1, 0)
""",
    ),
    Attack("set up io_uring", ("filter",), "call(nr.io_uring_setup, 4, bytes(120))"),
    Attack("add a key", ("filter",), 'call(nr.add_key, b"user", b"a", b"b", 1, -2)'),
    Attack("join a keyring", ("filter",), "call(nr.keyctl, 1, None)"),
    Attack(
        "ask for a key",
        ("filter",),
        """
try:
    call(nr.request_key, b"user", b"@TOKEN@", None, 0)
except OSError as error:
    assert error.errno == 126  # the kernel looked for it: ENOKEY
""",
    ),
    Attack("handle page faults", ("filter",), "call(nr.userfaultfd, 1)"),
    Attack("kexec", _BOTH, "call(nr.kexec_load, 0, 0, None, 0)"),
    Attack("load a module", _BOTH, 'call(nr.init_module, b"", 0, b"")'),
    Attack("load a module from a file", _BOTH, 'call(nr.finit_module, 0, b"", 0)'),
    Attack("reboot", _BOTH, "libc.reboot(0x4321FEDC)", lethal=True),
    Attack("swap to a file", _BOTH, 'open("/app/s", "w"); libc.swapon(b"/app/s", 0)'),
    # Times are set to what they are already.
    Attack(
        "set the time zone of the kernel", _BOTH, 'libc.settimeofday(None, struct.pack("ii", 0, 0))'
    ),
    Attack(
        "set the clock",
        _BOTH,
        """
now = struct.pack("ll", *divmod(time.time_ns(), 10**9))
call(nr.clock_settime, 0, now)
""",
    ),
    Attack(
        "steer the clock",
        ("caps",),
        """
state = ctypes.create_string_buffer(512)
libc.adjtimex(state)
struct.pack_into("I", state, 0, 2)
libc.adjtimex(state)
""",
    ),
    Attack("name the machine", ("caps",), "socket.sethostname(socket.gethostname())"),
    Attack("use ports of the machine", _BOTH, "libc.ioperm(0x80, 1, 1)")
    if platform.machine() == "x86_64"
    else Attack("hang up terminals", _BOTH, "libc.vhangup()"),
    Attack(
        "read the kernel's log", _BOTH, "libc.klogctl(3, ctypes.create_string_buffer(4096), 4096)"
    ),
    Attack("stop process accounting", _BOTH, "libc.acct(None)"),
    Attack("sync disk quotas", ("filter",), "libc.quotactl(0x80000100, None, 0, None)"),
    Attack(
        "make a call by other numbers (i386)",
        ("filter",),
        """
import mmap
code = bytes.fromhex("53b814000000cd805bc3")  # push rbx; mov eax, 20; int 0x80; pop rbx; ret
page = mmap.mmap(-1, 4096, prot=7)
page.write(code)
start = ctypes.addressof(ctypes.c_char.from_buffer(page))
if os.fork() == 0:
    os._exit(0 if ctypes.CFUNCTYPE(ctypes.c_int)(start)() == os.getpid() else 1)
assert os.wait()[1] == 0
""",
    ),
    Attack("take priority over the host", ("caps",), "os.setpriority(os.PRIO_PROCESS, 0, -20)"),
    Attack(
        "run in real time", ("caps",), "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))"
    ),
    Attack(
        "lock memory beyond the limit",
        ("caps",),
        """
import mmap
page = mmap.mmap(-1, 16 << 20)
libc.mlock(ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(page))), 16 << 20)
""",
    ),
    Attack(
        "take a dropped right back",
        ("caps",),
        """
_libc.capset(struct.pack("Ii", 0x20080522, 0), struct.pack("IIIIII", *[0xFFFFFFFF] * 6))
rights = next(line for line in open("/proc/self/status") if line.startswith("CapEff"))
assert int(rights.split()[1], 16) >> 21 & 1  # CAP_SYS_ADMIN
""",
    ),
]
