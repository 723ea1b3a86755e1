"""What must be true before the first service starts, and clearing up after the last.

Owns: the claim, the checks of host, server and model, the resolved configuration file. Promise:
everything a person can have got wrong is told here in one line, before anything runs; on leaving
the block, the runtime folder and whatever is left of any service are gone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from muster.config import Config
from muster.durability import check_settings
from muster.errors import ConfigError, HostUnfit
from muster.redis_link import check_url
from muster.rpc import check_address
from muster.streams import connect
from muster.supervise import plan, state
from muster.supervise.resolved import resolve, toml_of
from muster.types import Value

_CHECK_S = 60.0
_READS_MODEL = {"router", "inference", "trainer"}

Tell = Callable[[str], None]


class Prepared(Value, frozen=True):
    """All that a Supervisor needs."""

    config: Config
    claim: state.Claim
    services: tuple[plan.Service, ...]


@contextmanager
def prepared(
    config: Config, tell: Tell, *, cache: Path, only: Collection[str] = plan.FIVE
) -> Iterator[Prepared]:
    """Claim the state folder, check, resolve; `tell` gets lines for people.

    Raises MusterError subclasses that name the field, its value and the way out.
    """
    with _interruptible():
        claim, cleared = state.claim(config.state_dir)
        try:
            for line in cleared:
                tell(f"left by an earlier run: {line}")
            yield _prepare(config, claim, tell, cache, only)
        finally:
            for line in claim.release():
                if not line.startswith("removed"):
                    tell(f"after the stop: {line}")


def _prepare(
    config: Config, claim: state.Claim, tell: Tell, cache: Path, only: Collection[str]
) -> Prepared:
    check_given(config, only)
    services = plan.plan(config, claim.runtime, only)
    if config.redis.url:
        asyncio.run(_reach(config))
    else:
        (config.state_dir / "redis").mkdir(exist_ok=True)
    model = _model(config, cache, only, tell)
    if "sandbox" in only:
        check_host()
    url = plan.redis_url(config, claim.runtime)
    resolved = resolve(config, redis_url=url, model=model)
    file = plan.config_file(claim.runtime)
    file.write_text(toml_of(resolved), encoding="utf-8")
    return Prepared(resolved, claim, services)


def check_given(config: Config, only: Collection[str] = plan.FIVE) -> None:
    """What can be seen to be wrong in the settings without starting or fetching anything.

    Raises ConfigError or InvalidInput, which name the field, its value and the way out.
    """
    check_settings(config.redis)
    if config.redis.url:
        check_url(config.redis.url)
    for name in only:
        listen = getattr(config.sections.get(name), "listen", None)
        if listen is not None:
            check_address(listen, field=f"{name}.listen")
    _check_replicas(config)
    if _READS_MODEL & set(only):
        from muster.model import check_model

        check_model(config.model.path)


def _check_replicas(config: Config) -> None:
    """Several replicas cannot listen on one port."""
    listen = getattr(config.sections.get("inference"), "listen", "")
    if config.replicas > 1 and listen and not listen.endswith(":0"):
        raise ConfigError(
            f"{config.replicas} replicas cannot listen on one port",
            field="inference.listen",
            value=listen,
            way_out="write port 0: each takes a free one, and is found by its announcement",
        )


async def _reach(config: Config) -> None:
    async with connect(config.redis):
        pass


def check_host() -> None:
    """Raise HostUnfit with the sandbox's own words when boxes cannot be isolated here."""
    command = (sys.executable, "-P", "-m", "services.sandbox", "--check-host")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_CHECK_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as slow:
        raise HostUnfit(
            f"the check of this machine did not end within {_CHECK_S:.0f} s",
            way_out="run it by hand: python -m services.sandbox --check-host",
        ) from slow
    if done.returncode:
        said = (line.strip() for line in (done.stdout + done.stderr).splitlines())
        lines = [line for line in said if line and not line.startswith("ok ")]
        if done.returncode != 2:
            lines = lines[-1:]  # of a traceback
        way_out = "see it whole with: python -m services.sandbox --check-host"
        raise HostUnfit("this machine cannot isolate boxes: " + "; ".join(lines), way_out=way_out)


def _model(config: Config, cache: Path, only: Collection[str], tell: Tell) -> str:
    """The folder of the model, made if need be; untouched when nothing here reads it."""
    if not _READS_MODEL & set(only):
        return config.model.path
    from muster.model import ensure_model

    return str(ensure_model(config.model.path, cache, progress=tell))


def cache_dir() -> Path:
    """Where converted models lie: $MUSTER_CACHE, else ~/.cache/muster."""
    return Path(os.environ.get("MUSTER_CACHE") or Path.home() / ".cache" / "muster").absolute()


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind like Ctrl-C, so that what was claimed is given back."""

    def unwind(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        numbers.append(signal.SIGHUP)
    former = {number: signal.signal(number, unwind) for number in numbers}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
