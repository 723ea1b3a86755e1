"""How a container of ours is set up: limits, rights, labels. Pure.

Promise: no network unless it joins another box's, no mount of the host, no right to gain rights,
the seccomp filter of native boxes; memory without swap on top. PID 1 is ours, never the image's.
"""

from __future__ import annotations

import json
import platform
from typing import Any

from muster.types import Limits
from services.sandbox.adapters.docker import shell
from services.sandbox.adapters.docker.steps import PIDS_RESERVE
from services.sandbox.adapters.native import seccomp

# What root needs for its usual work in a box; the same as in a native one.
_RIGHTS = (
    "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP",
    "NET_BIND_SERVICE", "SYS_CHROOT",
)  # fmt: skip
INSTANCE, BOX, ROLE = "muster.instance", "muster.box", "muster.role"


def _filter() -> list[str]:
    """Ours where we have one: the engine's own lets other socket families and io_uring pass."""
    found = seccomp.profile(platform.machine())
    return [f"seccomp={json.dumps(found)}"] if found else []


def container(
    image: str, limits: Limits, labels: dict[str, str], life_s: int, *, network: str, quota: bool
) -> dict[str, Any]:
    """The engine's description of a box. quota: the storage driver takes a size."""
    first, *rest = shell.init(life_s)
    return {
        "Image": image,
        "Entrypoint": [first],
        "Cmd": rest,
        "WorkingDir": "/",
        "Hostname": "" if network != "none" else "box",
        "OpenStdin": True,
        "Healthcheck": {"Test": ["NONE"]},
        "Labels": labels,
        "HostConfig": {
            "NetworkMode": network,
            "Memory": limits.memory_bytes,
            "MemorySwap": limits.memory_bytes,
            "PidsLimit": limits.pids + PIDS_RESERVE,
            "NanoCpus": int(limits.cpus * 1e9),
            "CapDrop": ["ALL"],
            "CapAdd": list(_RIGHTS),
            "SecurityOpt": ["no-new-privileges", *_filter()],
            "LogConfig": {"Type": "none"},
            "IpcMode": "private",
            "ShmSize": 8 << 20,
            "Tmpfs": {shell.STATE_FOLDER: "size=512k,nr_inodes=16,mode=1777,nosuid,nodev,noexec"},
            "RestartPolicy": {"Name": "no"},
        }
        | ({"StorageOpt": {"size": str(limits.disk_bytes)}} if quota else {}),
    }
