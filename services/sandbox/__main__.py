"""`python -m services.sandbox --config FILE`: the boxes of one host, until SIGTERM.

It announces itself in the Redis of the configuration (`redis.url`), which has to run with
`appendonly yes`; `muster up` starts one, and this service with it. When it serves it prints
`ready`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from muster.lifecycle import Lifecycle
    from services.sandbox.box import Backend

_LEAVE_S = 1.0
_STOP_S = 3.0  # from the request to stop to the end of the process, whatever runs in boxes


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m services.sandbox",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, help="TOML file; default: built-in settings")
    parser.add_argument(
        "--check-host",
        action="store_true",
        help="say whether this host can make boxes as configured, and exit: 0 if it can, else 2",
    )
    arguments = parser.parse_args()
    if arguments.check_host:
        from services.sandbox.adapters import checking

        return checking.main(arguments.config)

    from muster import lifecycle

    return lifecycle.run(serve, name="sandbox", config_path=arguments.config, grace_s=_STOP_S)


async def serve(life: Lifecycle) -> None:
    """Open the backend (refusing a host that cannot isolate), announce, answer calls.

    Ends with Unavailable when the backend is lost: the boxes of this host are gone then, and what
    they did is not known, so the process ends for its supervisor to start another.
    """
    from muster import rpc
    from muster.advertise import advertised
    from muster.box_offer import Offer
    from muster.registry import Registry
    from muster.streams import connect
    from muster.v1.sandbox_pb2_grpc import add_SandboxServiceServicer_to_server
    from services.sandbox import limits
    from services.sandbox.adapters.opening import host_id, open_backend
    from services.sandbox.config import section
    from services.sandbox.driver import SandboxHost
    from services.sandbox.server import SERVICE_NAME, SandboxServicer

    config = section(life.config)
    name = host_id(life.config, config)
    async with (
        open_backend(life.config, config, stop_s=_STOP_S / 2) as (backend, bases),
        SandboxHost(backend, config, name, bases) as host,
        connect(life.config.redis) as redis,
    ):
        servicer = (add_SandboxServiceServicer_to_server, SandboxServicer(host, config.backend))
        limits_cpu = bool(getattr(backend, "limits_cpu", True))
        offer = Offer(backend.builds, bases.patterns, limits.most(config), limits_cpu)

        def info() -> dict[str, str]:
            capacity = host.capacity
            return {
                "boxes_max": str(capacity.boxes_max),
                "warm_max": str(capacity.warm_max),
                "backend": config.backend,
                "pressure_stall": "per step" if backend.tells_stall else "not told",
                "verify_timeout_s_max": f"{config.verify_timeout_s_max:g}",
                **offer.info(),
            }

        async with (
            rpc.serve(
                config.listen, [servicer], names=[SERVICE_NAME], field="sandbox.listen"
            ) as server,
            Registry(redis, life.config.run).announce(
                "sandbox", name, advertised(server.address, life.config), info
            ),
        ):
            # A person who started it alone sees that it serves.
            print(  # noqa: T201
                f"ready: sandbox host {name} ({config.backend}, {config.boxes_max} boxes) "
                f"at {server.address}",
                flush=True,
            )
            try:
                await life.stopping.wait()
            finally:
                host.stop()  # callers hear of it now, so that the server has nobody to wait for
                await _leave(backend)


async def _leave(backend: Backend) -> None:
    """Even if what is left to do takes too long, and the process is ended: boxes must not wait for
    a successor that nobody will start."""
    import asyncio
    import contextlib

    from services.sandbox.box import BoxFailure

    with contextlib.suppress(BoxFailure, TimeoutError):
        async with asyncio.timeout(_LEAVE_S):
            await backend.stopping()


if __name__ == "__main__":
    raise SystemExit(main())
