"""What an image says of itself reaches steps and verifiers: whole tasks through a host."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from muster.errors import InvalidInput
from muster.types import Limits
from services.sandbox.adapters.docker import opening
from services.sandbox.adapters.docker.backend import DockerBackend
from services.sandbox.box import BoxFailure, JudgeSpec, PutFile, Source
from services.sandbox.config import SandboxConfig
from services.sandbox.driver import SandboxHost
from tests.contract.hosts import KEY, acquire, step
from tests.integration.docker_engine import Engine, open_boxes

COLD = SandboxConfig(warm_max=0)
# A tool where an official image of a language has its own, and one where an agent can write.
BASE = """FROM muster/host-base
RUN mkdir -p /usr/local/bin /opt/own && cd /usr/local/bin \\
 && printf '#!/bin/sh\\necho tool $LEVEL' > tool && chmod 755 tool && cp tool /opt/own/loose
ENV PATH=/opt/own:/usr/local/bin:/usr/bin:/bin LEVEL=7 LANG=C
"""


@pytest.fixture
async def backend(docker_engine: Engine, tmp_path: Path) -> AsyncIterator[DockerBackend]:
    async with open_boxes(docker_engine, tmp_path / "run") as made:
        yield made


@pytest.fixture
async def host(backend: DockerBackend) -> AsyncIterator[SandboxHost]:
    async with SandboxHost(backend, COLD, "host") as made:
        yield made


async def verdict(host: SandboxHost, box: str) -> str:
    judged = await host.verify(KEY, box)
    return (judged.evidence.head + judged.evidence.tail).decode()


async def test_path_variables_and_folder_of_a_built_image_reach_steps(host: SandboxHost) -> None:
    dockerfile = f"{BASE}ARG SUB=deep\nWORKDIR /srv/$SUB\n"
    box = (await acquire(host, dockerfile=dockerfile)).box
    told = await step(host, box, 0, "pwd; tool; loose; echo $LANG $HOME $PAGER")
    assert told == "/srv/deep\ntool 7\ntool 7\nC /root cat\n"


async def test_what_the_task_says_counts_over_its_image(host: SandboxHost) -> None:
    toml = '[environment]\nworkdir = "/own"\n[environment.env]\nLEVEL = "8"\n'
    box = (await acquire(host, dockerfile=f"{BASE}WORKDIR /srv\n", toml=toml)).box
    assert await step(host, box, 0, "pwd; tool") == "/own\ntool 8\n"


async def test_they_reach_the_verifier_but_for_folders_of_the_agent_s(host: SandboxHost) -> None:
    dockerfile = f"{BASE}ENV PYTHONPATH=/opt/own BASH_ENV=/opt/own/rc NAME=given\nWORKDIR /srv\n"
    test = "pwd; tool; echo $NAME $HOME ${PYTHONPATH-unset} ${BASH_ENV-unset}; loose || true"
    box = (await acquire(host, dockerfile=dockerfile, test=test)).box
    await step(host, box, 0, "echo 'echo forged' > /opt/own/tool; chmod 755 /opt/own/tool; tool")
    told = await verdict(host, box)
    assert told.startswith("/srv\ntool 7\ngiven /tests unset unset\n")
    assert "loose: " in told  # not found: it lies where the agent writes


async def test_a_fork_keeps_its_own_variables_and_its_verifier_the_image_s(
    host: SandboxHost,
) -> None:
    box = (await acquire(host, dockerfile=f"{BASE}WORKDIR /srv\n", test="pwd; tool")).box
    await step(host, box, 0, "cd /tmp; unset LANG; export LEVEL=9")
    into = KEY.__class__("run", "g1", 1, 1, 5)
    twin = (await host.fork(KEY, box, into, 30.0, after=0)).box
    record, _ = await host.execute(into, twin, 1, "pwd; tool; echo ${LANG-unset}", 20, after=0)
    assert record.evidence.head + record.evidence.tail == b"/tmp\ntool 9\nunset\n"
    judged = (await host.verify(into, twin)).evidence
    assert judged.head + judged.tail == b"/srv\ntool 7\n"


async def test_links_of_the_agent_s_that_lead_to_the_verifier_s_own_are_cut(
    backend: DockerBackend,
) -> None:
    await backend.start("a", Limits())
    await backend.set_session("a", "/app", {"PATH": "/usr/bin:/bin"})
    # The base's own link to /proc first, then the agent's: straight, by others, by the root.
    plant = (
        "ln -s /tests/expected one; ln -s hop two; ln -s ../app/deep/up hop; mkdir deep;"
        " ln -s ../../logs deep/up; ln -s / root; ln -s /dev/stdin in; ln -s /proc/self/fd fds;"
        " echo mine > kept; ln -s kept good; ln -s /usr/bin/env tool; ln -s /nowhere/x none;"
        " echo 'raise SystemExit' > /conftest.py"
    )
    assert (await backend.run("a", plant, 20)).exit_code == 0
    await backend.seal("a")
    script = "ls /app /app/deep /conftest.py; cat /app/good"
    test = PutFile("/tests/test.sh", 0o755, script.encode())
    spec = JudgeSpec((test,), "/tests/test.sh", "/", {"PATH": "/usr/bin:/bin"}, 30, Limits())
    judged = (await backend.judge("a", spec)).evidence
    assert (judged.head + judged.tail).decode() == (
        "ls: cannot access '/conftest.py': No such file or directory\n"
        "/app:\ndeep\ngood\nkept\nnone\ntool\n\n/app/deep:\nmine\n"
    )


async def test_a_built_image_is_dropped_by_the_name_of_its_content(
    backend: DockerBackend, host: SandboxHost, docker_engine: Engine
) -> None:
    label = f"label=muster.instance={backend.setup.instance}"
    for number in range(2):
        box = (await acquire(host, dockerfile=f"{BASE}RUN echo {number}\n")).box
        await host.release(KEY, box)
    tags = docker_engine.docker("images", "--filter", label, "--format", "{{.Tag}}").split()
    assert len(tags) == 2
    assert await backend.drop("L-absent") is False
    box = (await acquire(host, dockerfile=f"{BASE}RUN echo 0\n")).box
    content = host._orders.boxes[box].setup.content
    with pytest.raises(BoxFailure):
        await backend.drop(content)
    await host.release(KEY, box)
    assert await backend.drop(content) is True
    assert await backend.drop(content) is False


async def test_nothing_is_fetched_by_the_engine_for_a_dockerfile(host: SandboxHost) -> None:
    for line in (
        "ADD http://127.0.0.1/x /x",
        "ADD \\\n http://127.0.0.1/x /x",
        "ARG A=http://127.0.0.1/x\nADD $A /x",
        "COPY --from=busybox /x /x",
        "COPY \\\n --from=busybox /x /x",
    ):
        with pytest.raises(InvalidInput) as caught:
            await acquire(host, dockerfile=f"FROM scratch\n{line}\n")
        assert caught.value.field.startswith("environment/Dockerfile"), line


async def test_boxes_are_found_again_when_the_machine_has_another_name(
    docker_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def killed(*_: object) -> None:
        pass

    with monkeypatch.context() as patch:
        patch.setattr(opening, "_close", killed)
        async with open_boxes(docker_engine, tmp_path / "run") as backend:
            await backend.start("a", Limits())
            await backend.note("a", b"noted")
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    async with open_boxes(docker_engine, tmp_path / "run") as backend:
        assert [found.box for found in await backend.survivors()] == ["a"]


async def test_a_box_killed_in_the_middle_of_a_copy_goes_on(
    docker_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def killed(*_: object) -> None:
        pass

    with monkeypatch.context() as patch:
        patch.setattr(opening, "_close", killed)
        async with open_boxes(docker_engine, tmp_path / "run") as backend:
            await backend.start("a", Limits(), Source())
            await backend.note("a", b"noted", b"shared")
            docker_engine.docker("pause", f"muster-{backend.setup.instance}-a")
    async with open_boxes(docker_engine, tmp_path / "run") as backend:
        assert [(s.note, s.shared) for s in await backend.survivors()] == [(b"noted", b"shared")]
        assert (await backend.run("a", "echo on", 20)).exit_code == 0
