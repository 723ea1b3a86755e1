"""Looks at a deployment for `muster doctor`: the server, who is announced, this machine.

Owns: the I/O, each part of it bounded in time. Promise: changes nothing; what cannot be looked at
is told as such and never taken for well. Does not cover: what it means (the doctor_* rules).
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distributions, requires
from importlib.metadata import version as installed
from pathlib import Path

import redis.exceptions as failures
from redis.asyncio import Redis
from redis.asyncio.connection import parse_url

from muster import doctor_versions, redis_link
from muster.clock import wall
from muster.config import Config, RedisConfig
from muster.doctor_fleet import ROLES, Seen, is_loopback
from muster.doctor_machine import ENGINES, Gpus, MachineFacts, Port
from muster.doctor_redis import RedisFacts
from muster.errors import MusterError
from muster.probe import probe
from muster.registry import Entry, Registry

ASK_S = 3.0
_BOXES_S = 60.0
_TORCH_S = 90.0
_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_NO_LIMIT = 1 << 60
_EXTRAS = {"inference": ("server", "cpu"), "trainer": ("server", "cpu")}
_ASK_TORCH = (
    "import torch; d = torch.cuda; n = d.is_available() and d.device_count(); "
    "v = torch.cuda.nccl.version() if n else (); "
    "print(int(n), torch.version.cuda or '-', '.'.join(map(str, v)) or '-')"
)


async def look_at_redis(config: RedisConfig) -> RedisFacts | None:
    """None when no server is configured."""
    if not config.url:
        return None
    shown = redis_link.shown_url(config.url)
    short = config.model_copy(update={"timeout_s": min(config.timeout_s, ASK_S)})
    try:
        async with redis_link.connect(short, reading=True) as client:
            return await _asked(client, shown)
    except MusterError as error:
        return RedisFacts(shown, error=error.problem)
    except (failures.RedisError, OSError, TimeoutError) as error:
        return RedisFacts(shown, error=f"{type(error).__name__}: {error}")


async def _asked(client: Redis, shown: str) -> RedisFacts:
    server = await redis_link.server_facts(client)
    seconds, microseconds = await client.time()
    ahead = float(seconds) + microseconds / 1e6 - wall()
    info = await client.info()
    bad = [name for name in ("aof_last_write_status", "aof_last_bgrewrite_status")
           if info.get(name, "ok") != "ok"]  # fmt: skip
    return RedisFacts(
        shown,
        server=server,
        used_bytes=int(info.get("used_memory", 0)),
        maxmemory_bytes=int(info.get("maxmemory", 0)),
        maxclients=int(info.get("maxclients", 0)),
        rejected=int(info.get("rejected_connections", 0)),
        aof_error=", ".join(bad),
        clock_ahead_s=ahead,
    )


async def look_at_fleet(config: Config) -> list[Seen]:
    """Every announced service, asked for its health. Raises MusterError without a server."""
    entries: list[Entry] = []
    async with redis_link.connect(config.redis, reading=True) as client:
        registry = Registry(client, config.run)
        for role in ROLES:
            listed = await registry.list(role)
            # Of router and bank the newest leads; an older entry is one that is about to end.
            entries += listed[-1:] if role in ("router", "readybank", "trainer") else listed
    async with asyncio.TaskGroup() as tasks:
        asked = [
            tasks.create_task(asyncio.to_thread(probe, entry.address, within_s=ASK_S))
            for entry in entries
        ]
    return [Seen(entry, task.result()) for entry, task in zip(entries, asked, strict=True)]


def look_at_machine(config: Config, roles: Sequence[str], seen: Sequence[Seen]) -> MachineFacts:
    """This machine, as far as these roles need it."""
    state = config.state_dir
    there = next(p for p in (state, *state.parents) if os.path.exists(p))
    packages = tuple(sorted({d.name.lower() for d in distributions()}))
    model, model_way_out = _model(config, roles)
    return MachineFacts(
        roles=tuple(roles),
        state_dir=str(state),
        running=_running(seen),
        writable=os.access(there, os.W_OK),
        disk_free=shutil.disk_usage(there).free,
        memory_bytes=_memory(),
        shm_bytes=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0,
        files_max=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        cores=_cores(),
        autogroups=_autogroups(),
        root=os.geteuid() == 0,
        packages=packages,
        missing=tuple(_missing(roles, packages)),
        model_error=model,
        model_way_out=model_way_out,
        ports=tuple(_ports(config, roles, seen)),
        remote_redis=_remote(config.redis.url),
        stored_error=_stored(config) if "trainer" in roles else "",
        gpus=_gpus() if ENGINES & set(roles) else None,
    )


def look_at_boxes(config_path: Path | None) -> list[str]:
    """What `--check-host` prints; it makes a box and ends it."""
    command = [sys.executable, "-P", "-m", "services.sandbox", "--check-host"]
    command += ["--config", str(config_path)] if config_path else []
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_BOXES_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"MISSING a box: the check did not end ({error})"]
    if done.returncode not in (0, 2):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return [f"MISSING a box: the check broke off: {last}"]
    return (done.stdout + done.stderr).splitlines()


def _missing(roles: Sequence[str], packages: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    extras = {extra for role in roles for extra in _EXTRAS.get(role, ("server",))}
    if "vllm" in packages:  # the build for GPUs takes the place of the one for processors
        extras = {"gpu" if extra == "cpu" else extra for extra in extras}
    try:
        texts = requires("muster-rl") or ()
    except PackageNotFoundError:
        return
    for package, wanted in doctor_versions.wanted(texts, extras):
        try:
            there = installed(package)
        except PackageNotFoundError:
            there = ""
        if not there or not doctor_versions.fits(there, wanted):
            yield package, wanted, there


def _model(config: Config, roles: Sequence[str]) -> tuple[str, str]:
    if not {"router", "inference", "trainer"} & set(roles):
        return "", ""
    from muster.model import check_model

    try:
        check_model(config.model.path)
    except MusterError as error:
        return f"{config.model.path}: {error.problem}", error.way_out
    return "", ""


def _ports(config: Config, roles: Sequence[str], seen: Sequence[Seen]) -> Iterator[Port]:
    """Fixed ports; one that our own announced service has is not taken."""
    here = socket.gethostname()
    ours = {s.entry.address.rpartition(":")[2] for s in seen if s.entry.host == here}
    for role in roles:
        listen = str(getattr(config.sections.get(role), "listen", ""))
        host, _, port = listen.rpartition(":")
        if listen.startswith("unix:") or not port.isdigit():
            continue
        if port == "0" or port in ours:
            yield Port(role, listen)
            continue
        error = _refused(host.strip("[]"), int(port))
        taken = error is not None and error.errno == errno.EADDRINUSE
        yield Port(role, listen, taken, "" if taken or error is None else str(error.strerror))


def _running(seen: Sequence[Seen]) -> tuple[str, ...]:
    """Roles that are announced from this machine."""
    here = socket.gethostname()
    return tuple(sorted({one.entry.kind for one in seen if one.entry.host == here}))


def _refused(host: str, port: int) -> OSError | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
            trial.listen(1)
        except OSError as error:
            return error
    return None


def _remote(url: str) -> bool:
    host = str(parse_url(url).get("host") or "") if url else ""
    return bool(host) and not is_loopback(f"{host}:0")


def _stored(config: Config) -> str:
    section = config.sections.get("trainer")
    if getattr(section, "transport", "") != "stored":
        return ""
    folder = Path(str(getattr(section, "transport_folder", "")))
    if not os.path.isdir(folder):
        return f"{folder} is no folder that this user sees"
    return "" if os.access(folder, os.W_OK) else f"{folder} cannot be written by this user"


def _memory() -> int:
    """What is available, or the limit of the group that this process is in, if that is less."""
    available = _NO_LIMIT
    for line in Path("/proc/meminfo").read_text("utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) << 10
    for name in _CGROUPS:
        try:
            text = Path(name).read_text("utf-8").strip()
        except OSError:
            continue
        if text.isdigit():
            available = min(available, int(text))
    return available


def _cores() -> float:
    """Of this process: its affinity, and the quota of its group."""
    cores = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text("utf-8").split()
        return cores if quota == "max" else min(cores, int(quota) / int(period))
    except (OSError, ValueError):
        return cores


def _autogroups(proc: Path = Path("/proc")) -> bool:
    """True where the kernel schedules each session as a group: it is asked to, and this process is
    at the root of the cpu controller. With cgroup v2 every box is in a group of it: then never."""
    try:
        enabled = (proc / "sys/kernel/sched_autogroup_enabled").read_text("utf-8").strip() == "1"
        lines = (proc / "self/cgroup").read_text("utf-8").splitlines()
    except OSError:
        return False
    own = {name: path for _, names, path in (line.split(":", 2) for line in lines)
           for name in names.split(",")}  # fmt: skip
    return enabled and own.get("cpu") == "/"


def _gpus() -> Gpus:
    """Asked in another process: torch is heavy, and a broken one must not break this."""
    devices = len([name for name in os.listdir("/dev") if name.removeprefix("nvidia").isdigit()])
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _ASK_TORCH], capture_output=True, text=True,
            timeout=_TORCH_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Gpus(devices, slow_s=_TORCH_S)
    if done.returncode:
        return Gpus(devices, error=(done.stderr.strip().splitlines() or ["no message"])[-1])
    seen, cuda, nccl = done.stdout.split()[-3:]
    return Gpus(devices, int(seen), cuda.strip("-"), nccl.strip("-"))
