"""Under which address others reach a service that listens on all addresses of its machine.

Promise: what is announced is what was listened on, but that a wildcard (0.0.0.0, [::]) becomes a
host: `advertise_host` where it is set, else the address from which this machine reaches Redis. In
a container that is the container's own on their common network, and it is found anew at each start.
Does not cover: ports that are mapped to others (listen on the one that others use).
"""

from __future__ import annotations

import socket

from redis.asyncio.connection import parse_url

from muster.config import Config
from muster.errors import ConfigError

_LOCAL = "127.0.0.1"
_WILDCARDS = ("0.0.0.0", "[::]")
_PORT = 6379


def advertised(address: str, config: Config) -> str:
    """What to announce for a server that listens on `address`. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    if host not in _WILDCARDS:
        return address
    found = own_host(config)
    return f"[{found}]:{port}" if ":" in found else f"{found}:{port}"


def own_host(config: Config) -> str:
    """A name or address of this machine that the other services can reach. Raises ConfigError.

    Looks at the routing table; sends nothing.
    """
    if config.advertise_host:
        return config.advertise_host
    parts = parse_url(config.redis.url) if config.redis.url else {}
    host = parts.get("host")
    if not host:  # a socket of this machine: so are all who use it
        return _LOCAL
    try:
        found = socket.getaddrinfo(host, parts.get("port") or _PORT, type=socket.SOCK_DGRAM)
        family, kind, _, _, target = found[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"cannot tell from which address of this machine {host} is reached: {error}",
            field="advertise_host",
            value=config.advertise_host,
            way_out="set it to a name or address at which the other services reach this machine",
        ) from error
