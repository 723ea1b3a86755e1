"""Boxes as containers of a real Docker Engine: what only a real one can try."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from muster.errors import HostUnfit
from muster.types import Limits, StepLimit
from services.sandbox.adapters.docker.backend import DockerBackend
from services.sandbox.adapters.docker.opening import instance_of, open_docker
from services.sandbox.box import BoxFailure, Evidence
from services.sandbox.ledger import which_limit
from tests.integration.docker_engine import Engine, open_boxes, settings

ENV = {"PATH": "/usr/bin:/bin", "HOME": "/root"}


@pytest.fixture
async def backend(docker_engine: Engine, tmp_path: Path) -> AsyncIterator[DockerBackend]:
    async with open_boxes(docker_engine, tmp_path / "run") as made:
        await made.start("a", Limits())
        await made.set_session("a", "/app", dict(ENV))
        yield made


def output(found: Evidence) -> str:
    return (found.head + found.tail).decode("utf-8", "replace")


async def told(backend: DockerBackend, command: str, timeout_s: float = 20) -> str:
    return output(await backend.run("a", command, timeout_s))


def container(engine: Engine, folder: Path, box: str = "a") -> str:
    return f"muster-{instance_of(folder / 'run')}-{box}"


async def test_a_server_in_the_background_neither_holds_the_step_nor_dies(
    backend: DockerBackend,
) -> None:
    serve = "python3 -c 'import http.server as h; h.test(h.SimpleHTTPRequestHandler, port=8000)' &"
    assert (await backend.run("a", serve, 20)).wall_s < 15
    fetch = (
        "for i in $(seq 100); do exec 3<>/dev/tcp/127.0.0.1/8000 && break; sleep 0.1; done"
        " 2>/dev/null; printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3; head -n 1 <&3"
    )
    assert "200 OK" in await told(backend, fetch)


async def test_a_background_writer_is_not_stopped_by_the_end_of_its_step(
    backend: DockerBackend,
) -> None:
    # More than a pipe holds, and later than the engine keeps the output of an ended process.
    await told(backend, "(sleep 3; head -c 1M /dev/zero && echo done > /app/written) & exit 0")
    waited = "for i in $(seq 150); do test -e written && break; sleep 0.1; done; cat written"
    assert await told(backend, waited) == "done\n"


async def test_much_output_keeps_its_ends(backend: DockerBackend) -> None:
    found = await backend.run("a", "echo first; yes | head -c 40M; echo last", 60)
    assert found.total == len("first\nlast\n") + (40 << 20)
    assert found.head.startswith(b"first\ny\n")
    assert found.tail.endswith(b"y\nlast\n")


async def test_a_spoiled_session_goes_on(backend: DockerBackend) -> None:
    for spoil in (
        "rm -rf /run/muster/*; mkdir /run/muster/state",
        "trap - EXIT; rm -rf /run/muster/*; mkfifo /run/muster/state; exit 0",
        "trap - EXIT; rm -rf /run/muster/*; ln -sf /dev/zero /run/muster/state",
        "trap - EXIT; echo 'exit 3' > /run/muster/state",
        "trap - EXIT; head -c 400k /dev/zero > /run/muster/state",
        "export BASH_ENV=/app/evil; echo 'exit 9' > /app/evil",
        "export PATH=/nowhere",
        "mkdir gone; cd gone; rmdir ../gone",
        "exec sleep 0",
        "exec >&- 2>&-",
        "kill -9 $PPID",
        "kill -9 -1",
        "if then (",
        "for i in /proc/[0-9]*/fd/*; do echo lies > $i; done",
    ):
        await backend.run("a", spoil, 10)
        found = await backend.run("a", "echo on", 10)
        assert (found.exit_code, output(found)) == (0, "on\n"), spoil


async def test_variables_with_any_content_are_carried(backend: DockerBackend) -> None:
    await told(backend, """export ODD=$'two\\nlines "quoted" $HOME = ü' -- ; export -n HOME""")
    assert await told(backend, 'printf "%s|%s" "$ODD" "${HOME-unset}"') == (
        'two\nlines "quoted" $HOME = ü|unset'
    )


async def test_a_signal_that_ended_the_shell_is_told_apart_from_an_exit_code(
    backend: DockerBackend,
) -> None:
    killed, exited = await backend.run("a", "kill -9 $$", 10), await backend.run("a", "exit 137", 9)
    assert (killed.exit_code, killed.signal) == (137, 9)
    assert (exited.exit_code, exited.signal) == (137, 0)


@pytest.mark.parametrize(
    ("command", "limit"),
    [
        ("sleep 60", StepLimit.TIME),
        ("python3 -c 'bytearray(400 << 20)'", StepLimit.MEMORY),
        ("head -c 100M /dev/zero > /tmp/fill", StepLimit.DISK),
        ("head -c 100M /dev/zero > /tmp/fill; sleep 60", StepLimit.DISK),
        (
            "python3 -c '\nimport os, time\nfor i in range(99):\n  os.fork() or time.sleep(9)'",
            StepLimit.PIDS,
        ),
        ("exit 9", StepLimit.NONE),
        ("exit 137", StepLimit.NONE),
    ],
)
async def test_the_limit_that_ended_a_step_is_named_and_the_next_step_runs(
    command: str, limit: StepLimit, backend: DockerBackend
) -> None:
    found = await backend.run("a", command, 2 if limit is StepLimit.TIME else 30)
    assert which_limit(found) is limit
    assert output(await backend.run("a", "rm -f /tmp/fill; echo on", 60)) == "on\n"


async def test_a_time_limit_ends_the_whole_tree_and_spares_what_was_there_before(
    backend: DockerBackend,
) -> None:
    # Processes by their names: their arguments stand in those of the shells around them too.
    await told(
        backend, "cp /usr/bin/sleep /tmp/early; cp /usr/bin/sleep /tmp/late; /tmp/early 777 &"
    )
    tree = '(setsid bash -c \'trap "" TERM; (trap "" TERM; /tmp/late 888) & wait\' &); sleep 0.5'
    count = "for n in early late; do grep -sx $n /proc/[0-9]*/comm | wc -l; done"
    found = await backend.run("a", f"trap '' TERM; {tree}; {count}; sleep 60", 3)
    assert found.timed_out
    assert output(found) == "1\n1\n"  # both were there
    assert await told(backend, count) == "1\n0\n"


async def test_a_fork_bomb_ends_with_its_step(backend: DockerBackend) -> None:
    found = await backend.run("a", "b() { b | b & }; b; sleep 60", 2)
    assert found.timed_out
    assert found.pids_refused > 0
    assert output(await backend.run("a", "echo on", 20)) == "on\n"


async def test_a_box_whose_killer_was_spoiled_is_ended_as_broken_by_its_agent(
    backend: DockerBackend, docker_engine: Engine, tmp_path: Path
) -> None:
    # The shell that would kill says that it did.
    liar = (
        "mv /usr/bin/bash /usr/bin/real; printf '#!/usr/bin/real\\necho -n done\\n' >/usr/bin/bash"
    )
    found = await backend.run("a", f"sleep 600 & {liar}; chmod 755 /usr/bin/bash; sleep 60", 2)
    assert found.timed_out
    assert "survived" in found.broken
    state = docker_engine.docker(
        "inspect", "-f", "{{.State.Running}}", container(docker_engine, tmp_path)
    )
    assert state == "false\n"
    assert (await backend.run("a", "echo on", 10)).broken


async def test_a_box_whose_shell_is_gone_is_broken(backend: DockerBackend) -> None:
    await told(backend, "rm /usr/bin/bash")
    found = await backend.run("a", "echo on", 10)
    assert "no shell" in found.broken


async def test_orphans_are_reaped(backend: DockerBackend) -> None:
    await told(backend, "for i in $(seq 30); do (sleep 0.1 &) ; done; sleep 0.5")
    assert await told(backend, "grep -ls 'State:.Z' /proc/[0-9]*/status | wc -l") == "0\n"


async def test_a_container_has_no_network_no_mount_of_the_host_and_few_rights(
    backend: DockerBackend, docker_engine: Engine, tmp_path: Path
) -> None:
    found = json.loads(docker_engine.docker("inspect", container(docker_engine, tmp_path)))[0]
    assert found["Mounts"] == []
    host = found["HostConfig"]
    assert (host["NetworkMode"], host["CapDrop"], host["Privileged"]) == ("none", ["ALL"], False)
    assert host["MemorySwap"] == host["Memory"] == Limits().memory_bytes
    assert await told(backend, "ls /sys/class/net; ls /run/docker.sock /var/run/docker.sock") == (
        "lo\nls: cannot access '/run/docker.sock': No such file or directory\n"
        "ls: cannot access '/var/run/docker.sock': No such file or directory\n"
    )
    rights = await told(backend, "grep -E 'CapEff|CapBnd|NoNewPrivs|Seccomp:' /proc/self/status")
    assert rights.split() == [
        "CapEff:", "00000000000405fb", "CapBnd:", "00000000000405fb", "NoNewPrivs:", "1",
        "Seccomp:", "2",
    ]  # fmt: skip


async def test_processor_time_is_that_of_the_step(backend: DockerBackend) -> None:
    found = await backend.run("a", "python3 -c 'sum(range(40_000_000))'", 90)
    assert found.cpu_s > 0.2
    assert (await backend.run("a", "sleep 0.5", 10)).cpu_s < found.cpu_s


async def test_pressure_stall_is_not_told_beside_what_an_earlier_step_left_running(
    backend: DockerBackend,
) -> None:
    if not backend.tells_stall:
        pytest.skip("the engine's groups tell no pressure stall here")
    assert (await backend.run("a", "sleep 60 & exit 0", 10)).cpu_stall_s >= 0
    assert (await backend.run("a", "exit 0", 10)).cpu_stall_s == -1


async def test_a_container_that_somebody_else_ended_is_the_host_s_loss(
    backend: DockerBackend, docker_engine: Engine, tmp_path: Path
) -> None:
    docker_engine.docker("kill", container(docker_engine, tmp_path))
    with pytest.raises(BoxFailure):
        await backend.run("a", "echo on", 10)
    assert await backend.alive("a") is False
    assert await backend.end("a") is True


async def test_an_orderly_end_leaves_nothing_in_the_engine(
    docker_engine: Engine, tmp_path: Path
) -> None:
    label = f"label=muster.instance={instance_of(tmp_path / 'run')}"
    async with open_boxes(docker_engine, tmp_path / "run") as backend:
        await backend.start("a", Limits())
        await backend.snapshot("a", "L-a", keep=True)
        await backend.squash("L-a", "L-b")
        await backend.note("a", b"noted")
        assert docker_engine.docker("ps", "-aq", "--filter", label)
        assert len(docker_engine.docker("images", "-q", "--filter", label).split()) == 2
    assert docker_engine.docker("ps", "-aq", "--filter", label) == ""
    assert docker_engine.docker("images", "-aq", "--filter", label) == ""
    assert list((tmp_path / "run" / "boxes").iterdir()) == []


async def test_without_an_engine_the_host_is_unfit_and_says_what_to_do(tmp_path: Path) -> None:
    config = settings(Engine(f"unix://{tmp_path}/no.sock"))
    with pytest.raises(HostUnfit) as caught:
        async with open_docker(config, tmp_path / "run"):
            pass
    assert "sandbox.docker_url" in caught.value.way_out


async def test_an_image_that_the_engine_lacks_is_named(
    docker_engine: Engine, tmp_path: Path
) -> None:
    config = settings(docker_engine, bases={"ubuntu:*": "image:muster-nowhere:9"})
    with pytest.raises(HostUnfit) as caught:
        async with open_docker(config, tmp_path / "run"):
            pass
    assert (caught.value.field, caught.value.value) == (
        'sandbox.bases."ubuntu:*"',
        "muster-nowhere:9",
    )


async def test_a_second_host_in_the_same_folder_is_refused(
    backend: DockerBackend, docker_engine: Engine, tmp_path: Path
) -> None:
    with pytest.raises(HostUnfit, match="another sandbox host"):
        async with open_boxes(docker_engine, tmp_path / "run"):
            pass
