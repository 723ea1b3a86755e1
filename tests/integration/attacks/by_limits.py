"""Taking more than a box may have; each bounded, so that the control does no harm."""

from __future__ import annotations

from tests.integration.attacks.attempt import Attack

ATTACKS = [
    Attack(
        "fork bomb",
        ("pids",),
        """
for _ in range(150):
    if os.fork() == 0:
        time.sleep(20)
        os._exit(0)
""",
    ),
    Attack("fill the memory", ("memory",), "bytearray(300 << 20)"),
    Attack("fill the disk", ("disk",), 'open("/tmp/fill", "wb").write(bytes(48 << 20))'),
    Attack(
        "fill the disk with empty files",
        ("disk",),
        """
for number in range(6000):
    open(f"/tmp/{number}", "w").close()
""",
    ),
    Attack(
        "open files without end",
        ("rlimits",),
        """
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
held = [os.dup(0) for _ in range(5000)]
""",
    ),
]
