"""A service killed with boxes in a Docker Engine, and the next one of its folder."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from muster.types import Limits
from services.sandbox.adapters.docker.backend import DockerBackend
from services.sandbox.adapters.docker.opening import instance_of
from services.sandbox.box import Evidence, JudgeSpec, PutFile
from tests.integration.docker_engine import Engine, open_boxes

ROOT = Path(__file__).resolve().parents[2]
SERVICE = """
import asyncio, sys
from pathlib import Path
from muster.types import Limits
from services.sandbox.box import Source
from tests.integration.docker_engine import Engine, open_boxes

ENV = {"PATH": "/usr/bin:/bin", "HOME": "/root"}

async def main():
    async with open_boxes(Engine(sys.argv[1]), Path(sys.argv[2])) as backend:
        await backend.start("a", Limits())
        await backend.set_session("a", "/app", ENV)
        await backend.run("a", "echo set-up > /etc/answer; echo given > given", 20)
        await backend.snapshot("a", "L-a", keep=False)
        for box in ("noted", "warm", "stepping"):
            await backend.start(box, Limits(), Source(layer="L-a"))
            await backend.set_session(box, "/app", ENV)
        for box in ("noted", "stepping"):
            await backend.note(box, box.encode())
        await backend.run("noted", "cp /usr/bin/sleep /tmp/left; cd /tmp", 20)
        await backend.run("noted", "export COLOUR=blue; ./left 500 & echo ran", 20, turn=3)
        asyncio.get_running_loop().call_later(1.0, lambda: print("up", flush=True))
        await backend.run("stepping", "sleep 300", 400, turn=0)

asyncio.run(main())
"""


@asynccontextmanager
async def killed_service(engine: Engine, folder: Path) -> AsyncIterator[None]:
    """A service that was killed while a step ran."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVICE, engine.url, str(folder), cwd=ROOT,
        stdout=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 90) == b"up\n"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    yield


def output(found: Evidence) -> str:
    return (found.head + found.tail).decode()


def ours(engine: Engine, folder: Path) -> tuple[set[str], int]:
    """Names of the containers, and how many images, of the folder's instance."""
    instance = instance_of(folder)
    label = f"label=muster.instance={instance}"
    names = engine.docker("ps", "-a", "--filter", label, "--format", "{{.Names}}").split()
    images = engine.docker("images", "-q", "--filter", label).split()
    return {name.removeprefix(f"muster-{instance}-") for name in names}, len(images)


async def judged(backend: DockerBackend, box: str) -> str:
    await backend.seal(box)
    test = PutFile("/tests/test.sh", 0o755, b"cat /etc/answer /app/given /tmp/new")
    env = {"PATH": "/usr/bin:/bin"}
    spec = JudgeSpec((test,), "/tests/test.sh", "/", env, 30, Limits())
    return output((await backend.judge(box, spec)).evidence)


async def test_a_noted_box_goes_on_and_the_rest_of_a_killed_service_goes(
    docker_engine: Engine, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    async with killed_service(docker_engine, folder):
        assert ours(docker_engine, folder) == ({"noted", "warm", "stepping"}, 1)
    async with open_boxes(docker_engine, folder) as backend:
        assert ours(docker_engine, folder) == ({"noted"}, 1)  # its snapshot is needed still
        (found,) = await backend.survivors()
        assert (found.box, found.note, found.newest_turn) == ("noted", b"noted", 3)
        assert found.running is None
        assert [(s.turn, output(s.evidence)) for s in found.kept] == [(3, "ran\n")]
        command = "pwd; echo $COLOUR; echo new > new; grep -csx left /proc/[0-9]*/comm"
        said = output(await backend.run("noted", command, 20, turn=4))
        assert said.startswith("/tmp\nblue\n")
        assert ":1" in said  # what it had left running goes on
        assert await judged(backend, "noted") == "set-up\ngiven\nnew\n"
        assert await backend.end("noted") is True
        assert ours(docker_engine, folder) == (set(), 0)


async def test_a_record_that_cannot_be_read_is_no_record(
    docker_engine: Engine, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    async with killed_service(docker_engine, folder):
        pass
    states = list((folder / "boxes").glob("*/state"))
    assert len(states) == 2
    for path in states:
        path.write_bytes(path.read_bytes()[:-9])
    async with open_boxes(docker_engine, folder) as backend:
        assert await backend.survivors() == ()
        assert ours(docker_engine, folder) == (set(), 0)
