"""`muster doctor` on real parts that something is wrong with, as a person has them.

The rules alone, with every fault: tests/unit/doctor/test_rules.py.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from redis.asyncio import Redis

from muster import rpc
from muster.doctor_fleet import ROLES
from muster.probe import probe
from muster.registry import Registry
from tests.integration.redis_own import OwnServer

pytestmark = pytest.mark.timeout(300)
RUN = "sick"


@dataclass(frozen=True)
class Told:
    """What one call of the doctor said: problems by name, with their fixes."""

    status: int
    problems: dict[str, str]
    names: set[str]


async def doctor(folder: Path, *options: str, **variables: str) -> Told:
    environment = {f"MUSTER_{name}": value for name, value in variables.items()}
    environment |= {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    environment |= {"MUSTER_STATE_DIR": str(folder / "state"), "MUSTER_RUN": RUN}
    command = [sys.executable, "-m", "muster.cli.main", "doctor", "--json", *options]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, env=environment, timeout=200
    )
    assert done.stdout, done.stderr
    checks = [json.loads(line) for line in done.stdout.splitlines()]
    bad = {c["name"]: c["way_out"] for c in checks if c["status"] == "problem"}
    assert all(bad.values()), bad
    return Told(done.returncode, bad, {c["name"] for c in checks})


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[OwnServer]:
    own = OwnServer(tmp_path)
    yield own
    await own.admin.aclose()
    own.kill()


@asynccontextmanager
async def announced(own: OwnServer, *, without: str = "") -> AsyncIterator[None]:
    """A run of which every role but one is announced, and serves."""
    async with rpc.serve("127.0.0.1:0", []) as running:
        registry = Registry(own.admin, RUN)
        async with asyncio.TaskGroup() as tasks:
            done, ready = asyncio.Event(), [asyncio.Event() for _ in ROLES]

            async def stay(role: str, up: asyncio.Event) -> None:
                if role != without:
                    async with registry.announce(role, f"{role}-1", running.address):
                        up.set()
                        await done.wait()
                up.set()

            for role, up in zip(ROLES, ready, strict=True):
                tasks.create_task(stay(role, up), name=role)
            for up in ready:
                await up.wait()
            try:
                yield
            finally:
                done.set()


async def test_a_well_deployment_has_no_problem(server: OwnServer, tmp_path: Path) -> None:
    await server.start()
    async with announced(server):
        told = await doctor(tmp_path, "--role", "readybank", REDIS__URL=server.config.url)
    assert (told.status, told.problems) == (0, {})
    assert {"redis.durability", "redis.clock", "fleet.router", "fleet.versions"} <= told.names


@pytest.mark.parametrize(
    ("options", "found", "fix"),
    [
        (("--appendonly", "no"), "redis.durability", "appendonly yes"),
        (("--appendfsync", "no"), "redis.durability", "appendfsync everysec"),
        (("--maxmemory-policy", "allkeys-lru"), "redis.durability", "noeviction"),
        (("--maxmemory", "1200kb"), "redis.memory", "maxmemory"),
        (("--maxclients", "40"), "redis.connections", "maxclients"),
        (("--requirepass", "secret"), "redis.url", "PASSWORD"),
    ],
)
async def test_a_server_that_keeps_too_little(
    server: OwnServer, tmp_path: Path, options: tuple[str, ...], found: str, fix: str
) -> None:
    await server.admin.aclose()
    server.admin = Redis(unix_socket_path=str(server.socket), password=_password(options))
    await server.start(*options)
    told = await doctor(tmp_path, "--role", "none", REDIS__URL=server.config.url)
    assert told.status == 1
    assert fix in told.problems[found]


def _password(options: tuple[str, ...]) -> str | None:
    return options[1] if options[0] == "--requirepass" else None


async def test_no_server_is_told_once_and_what_it_hides_is_not_taken_for_well(
    tmp_path: Path,
) -> None:
    told = await doctor(tmp_path, "--role", "none", REDIS__URL=f"unix://{tmp_path}/none")
    assert [*told.problems] == ["redis.url"]
    assert "fleet" in told.names


async def test_who_is_missing_and_who_does_not_answer(server: OwnServer, tmp_path: Path) -> None:
    await server.start()
    async with announced(server, without="readybank"):
        gone = Registry(server.admin, RUN)
        async with gone.announce("inference", "inference-2", "127.0.0.1:9"):
            told = await doctor(tmp_path, "--role", "none", REDIS__URL=server.config.url)
    assert {*told.problems} == {"fleet.readybank", "fleet.inference"}


async def test_settings_that_are_wrong(tmp_path: Path) -> None:
    told = await doctor(tmp_path, ROUTER__LISTEM="x")
    assert "listen" in told.problems["configuration"]


async def test_a_port_that_another_process_has(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        told = await doctor(tmp_path, "--role", "readybank", READYBANK__LISTEN=listen)
    assert "readybank.listen" in told.problems


async def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    told = await doctor(tmp_path, "--role", "router", MODEL__PATH=str(tmp_path / "none"))
    assert "model.path" in told.problems


async def test_a_folder_for_versions_that_is_not_there(tmp_path: Path) -> None:
    told = await doctor(
        tmp_path, "--role", "trainer", TRAINER__TRANSPORT="stored",
        TRAINER__TRANSPORT_FOLDER=str(tmp_path / "none"), TRAINER__POLICY="fake",
    )  # fmt: skip
    assert "trainer.transport_folder" in told.problems


async def test_box_settings_that_do_not_fit_the_routers(tmp_path: Path) -> None:
    told = await doctor(tmp_path, "--role", "sandbox", SANDBOX__ORPHAN_S="1")
    assert "boxes.settings" in told.problems


async def test_a_base_that_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "muster.toml"
    file.write_text(f'[sandbox.bases]\n"x:*" = "{tmp_path}/none"\n')
    told = await doctor(tmp_path, "--role", "sandbox", "--config", str(file))
    assert "boxes.base" in told.problems


async def test_the_probe_of_a_container_says_why(tmp_path: Path) -> None:
    async with rpc.serve("127.0.0.1:0", [], names=["a"]) as running:
        assert await asyncio.to_thread(probe, running.address, "a") == ""
        assert "NOT_FOUND" in await asyncio.to_thread(probe, running.address, "b")
        await running.set_serving("a", False)
        assert await asyncio.to_thread(probe, running.address, "a") == "NOT_SERVING"
    assert "UNAVAILABLE" in await asyncio.to_thread(probe, running.address, "a", within_s=1.0)
