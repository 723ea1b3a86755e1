"""How a service process lives: uvloop, signals, two-stage shutdown.

Promise: the first SIGTERM or SIGINT sets `stopping` and the service drains; a second one, or
`grace_s` later, the process exits hard with status 1. A service that ends by itself with an
exception logs it and exits 1; with a MusterError, exits 2 and prints the error for people.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from muster import telemetry
from muster.config import Config, load_config
from muster.errors import MusterError
from muster.lag import LoopLag


class Lifecycle:
    """What the main coroutine of a service is given."""

    def __init__(self, name: str, config: Config, grace_s: float):
        self.name, self.config, self.grace_s = name, config, grace_s
        self.stopping = asyncio.Event()
        self._watchdog: asyncio.TimerHandle | None = None

    def stop(self, reason: str) -> None:
        """First call drains, second exits at once. Safe from signal handlers of the loop."""
        if self.stopping.is_set():
            self._exit(f"asked twice to stop ({reason})")
        telemetry.logger("muster.lifecycle").info("stopping: %s", reason)
        self.stopping.set()
        loop = asyncio.get_running_loop()
        self._watchdog = loop.call_later(
            self.grace_s, self._exit, f"still running {self.grace_s} s after {reason}"
        )

    def _exit(self, why: str) -> None:
        telemetry.logger("muster.lifecycle").error("hard exit: %s", why)
        sys.stderr.flush()
        os._exit(1)


ServiceMain = Callable[[Lifecycle], Awaitable[None]]


def run(main: ServiceMain, *, name: str, config_path: Path | None, grace_s: float = 5.0) -> int:
    """Run one service to its end and return the exit status."""
    import uvloop

    try:
        config = load_config(config_path, os.environ)
        telemetry.configure(name, config.telemetry, config.state_dir)
        uvloop.run(_supervised(main, Lifecycle(name, config, grace_s)))
        return 0
    except (MusterError, BaseExceptionGroup) as error:
        leaves = _leaves(error)
        if not all(isinstance(leaf, MusterError) for leaf in leaves):
            raise
        for line in dict.fromkeys(map(str, leaves)):  # many calls may have met the same end
            print(f"{name}: {line}", file=sys.stderr)  # noqa: T201 - the person's line
        return 2
    finally:
        telemetry.flush()


async def _supervised(main: ServiceMain, life: Lifecycle) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, life.stop, signal.Signals(number).name)
    lag = LoopLag(loop, life.config.telemetry.loop_lag_s)
    try:
        await main(life)
    finally:
        lag.stop()


def _leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
