"""Verifiers, copies and builds on a real Docker Engine: what an agent left decides nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from muster.archive import TaskFile
from muster.errors import InvalidInput
from muster.types import Limits
from services.sandbox.adapters.docker.backend import DockerBackend
from services.sandbox.box import CopiedFile, Evidence, Judgement, JudgeSpec, PutFile, Source
from tests.integration.docker_engine import Engine, open_boxes

ENV = {"PATH": "/usr/bin:/bin", "HOME": "/root"}


@pytest.fixture
async def backend(docker_engine: Engine, tmp_path: Path) -> AsyncIterator[DockerBackend]:
    async with open_boxes(docker_engine, tmp_path / "run") as made:
        yield made


async def fresh(backend: DockerBackend, box: str, layer: str = "") -> None:
    await backend.start(box, Limits(), Source(layer=layer))
    await backend.set_session(box, "/app", dict(ENV))


def output(found: Evidence) -> str:
    return (found.head + found.tail).decode("utf-8", "replace")


async def told(backend: DockerBackend, box: str, command: str) -> str:
    return output(await backend.run(box, command, 30))


async def judged(backend: DockerBackend, box: str, script: str, *, live: bool = False) -> Judgement:
    if not live:
        await backend.seal(box)
    test = PutFile("/tests/test.sh", 0o755, script.encode())
    spec = JudgeSpec((test,), "/tests/test.sh", "/", dict(ENV), 30, Limits(), live=live)
    return await backend.judge(box, spec)


async def test_the_verifier_s_tools_are_not_the_agent_s(backend: DockerBackend) -> None:
    await fresh(backend, "a")
    # A link of the set-up's that leads to a folder of tools, which the agent makes a folder.
    await told(
        backend, "a", "ln -s /usr/local/bin /root/bin; mkdir -p /usr/local/bin; ln -s / /all"
    )
    await backend.snapshot("a", "L-a", keep=False)
    await fresh(backend, "b", "L-a")
    await told(
        backend,
        "b",
        "echo x > /etc/ld.so.preload; mkdir /tests; "
        "echo planted > /tests/conftest.py; rm /root/bin; mkdir /root/bin; "
        "echo 'echo forged' > /root/bin/cat; chmod 755 /root/bin/cat; echo 7 > /app/answer; "
        "cp /root/bin/cat /usr/bin/new; mv /usr/bin/new /usr/bin/cat",
    )
    found = await judged(
        backend,
        "b",
        "cat /app/answer > /logs/verifier/reward.txt; ls /usr/local/bin /tests /etc/ld.so.preload;"
        "test -f /root/bin/cat && test ! -L /root/bin && echo carried",
    )
    assert found.files == {"reward.txt": b"7\n"}
    said = output(found.evidence)
    assert "forged" not in said
    assert "conftest" not in said
    assert said.endswith("/usr/local/bin:\ncarried\n")  # nothing came through the link


async def test_removed_replaced_and_many_files_are_carried_over(backend: DockerBackend) -> None:
    await fresh(backend, "a")
    make = "mkdir -p /opt/x/sub /opt/y; echo 1 > /opt/x/a; echo 2 > /opt/x/sub/b; echo 3 > /opt/y/c"
    await told(backend, "a", make)
    await backend.snapshot("a", "L-a", keep=False)
    for box, many in (("b", ""), ("c", "for i in $(seq 100); do echo $i > /tmp/f$i; done; ")):
        await fresh(backend, box, "L-a")
        await told(
            backend,
            box,
            f"{many}rm -rf /opt/x; mkdir /opt/x; echo n > /opt/x/new; rm -rf /opt/y; "
            "ln -s /opt/x /opt/y; ln /opt/x/new /opt/x/same; chmod 700 /opt; mkfifo /app/fifo; "
            "touch /app/-rf '/app/ü x'; chown 7:8 /app/-rf",
        )
        found = await judged(
            backend,
            box,
            "cd /opt; find . | sort; readlink y; cat y/same; stat -c %a .; ls /tmp | wc -l; "
            "stat -c %U%u:%g /app/-rf; ls /app",
        )
        count = 100 if many else 0
        assert output(found.evidence) == (
            f".\n./x\n./x/new\n./x/same\n./y\n/opt/x\nn\n700\n{count}\nUNKNOWN7:8\n-rf\nfifo\nü x\n"
        )


async def test_what_an_agent_left_in_a_kept_snapshot_is_no_set_up_of_its_forks(
    backend: DockerBackend,
) -> None:
    await fresh(backend, "a")
    await told(backend, "a", "echo set-up > /etc/answer; echo x > given; echo x > gone")
    await backend.snapshot("a", "L-setup", keep=False)
    await fresh(backend, "b", "L-setup")
    await told(backend, "b", "echo agent > /etc/answer; echo new > given; rm gone; echo 1 > first")
    await backend.snapshot("b", "L-agent", keep=True)
    await backend.squash("L-agent", "L-one")
    await fresh(backend, "c", "L-agent")
    await told(backend, "c", "rm first; echo 2 > second")
    await backend.snapshot("c", "L-more", keep=False)
    for number, (layer, files) in enumerate(
        [("L-agent", "first\ngiven\n"), ("L-one", "first\ngiven\n"), ("L-more", "given\nsecond\n")]
    ):
        await fresh(backend, f"f{number}", layer)
        assert await told(backend, f"f{number}", "cat /etc/answer") == "agent\n"
        found = await judged(backend, f"f{number}", "cat /etc/answer /app/given; ls /app")
        assert output(found.evidence) == f"set-up\nnew\n{files}", layer


@pytest.mark.parametrize(
    ("plant", "problem"),
    [
        ("ln -s /app/one reward.txt", "not a plain file"),
        ("mkfifo reward.txt", "not a plain file"),
        ("mkdir reward.txt", "not a plain file"),
        ("head -c 70000 /dev/zero > reward.txt", "over 65536 bytes"),
        ("true", "absent"),
    ],
)
async def test_a_verdict_that_is_no_small_plain_file_is_none(
    plant: str, problem: str, backend: DockerBackend
) -> None:
    await fresh(backend, "a")
    await told(backend, "a", "echo 1 > one")
    found = await judged(backend, "a", f"cd /logs/verifier && {plant}")
    assert found.files == {}
    assert found.problems["reward.txt"] == problem


async def test_a_live_verifier_reaches_the_agent_s_service_and_sees_no_process_of_it(
    backend: DockerBackend,
) -> None:
    await fresh(backend, "a")
    serve = "python3 -m http.server 8000 >/dev/null 2>&1 &"
    await told(backend, "a", f"echo mine > index.html; {serve}")
    fetch = (
        "for i in $(seq 100); do exec 3<>/dev/tcp/127.0.0.1/8000 && break; sleep 0.1; done"
        " 2>/dev/null; printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3; tail -n 1 <&3; ls -A /app;"
        " grep -sx python3 /proc/[0-9]*/comm | wc -l"
    )
    assert await told(backend, "a", "grep -sx python3 /proc/[0-9]*/comm | wc -l") == "1\n"
    found = await judged(backend, "a", fetch, live=True)
    said = output(found.evidence)
    assert said.startswith("mine\n")
    assert "index.html" not in said
    assert said.endswith("0\n")


async def test_a_folder_comes_back_as_it_went_in(backend: DockerBackend) -> None:
    await fresh(backend, "a")
    files = (
        CopiedFile("made", "folder", 0o750),
        CopiedFile("made/run.sh", "file", 0o755, b"echo ran\n"),
        CopiedFile("made/link", "link", 0o777, b"", "run.sh"),
        CopiedFile("made/deep/er/ü", "file", 0o644, bytes(range(256))),
    )
    await backend.copy_in("a", "/data/in", files)
    assert await told(backend, "a", "/data/in/made/link") == "ran\n"
    found = {file.path: file for file in await backend.copy_out("a", "/data/in/made", 1 << 20)}
    assert {file.path: file for file in files}.items() <= found.items()


@pytest.mark.parametrize(
    ("plant", "path", "why"),
    [
        ("true", "/app/no", "not there"),
        ("mkfifo /app/x", "/app", "FIFO"),
        ("ln -s /etc/passwd x", "/app", "absolute"),
        ("ln -s ../etc/passwd x", "/app", "leads out"),
        ("ln -s /etc x", "/app/x/passwd", "link"),
        ("ln -s /etc x", "/app/x", "is a link"),
        ("head -c 3000 /dev/zero > x", "/app", "more than"),
        (
            "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"/app/x\")'",
            "/app",
            "socket",
        ),
        ("true", "/app/../etc", ".."),
    ],
)
async def test_what_cannot_be_copied_out_is_refused_by_name(
    plant: str, path: str, why: str, backend: DockerBackend
) -> None:
    await fresh(backend, "a")
    await told(backend, "a", plant)
    with pytest.raises(InvalidInput, match=why) as caught:
        await backend.copy_out("a", path, 2000)
    assert caught.value.field == "path"
    assert await told(backend, "a", "echo on") == "on\n"


async def test_nothing_is_written_through_a_planted_link(backend: DockerBackend) -> None:
    await fresh(backend, "a")
    await told(backend, "a", "ln -s /etc there; ln -s /etc/passwd file")
    for path in ("there/new", "there"):
        with pytest.raises(InvalidInput, match="link"):
            await backend.copy_in("a", "/app", (CopiedFile(f"{path}/x", data=b"x"),))
    await backend.copy_in("a", "/app", (CopiedFile("file", data=b"mine"),))
    assert (await told(backend, "a", "cat file; head -c 5 /etc/passwd; ls /etc/new /etc/x")) == (
        "mineroot:ls: cannot access '/etc/new': No such file or directory\n"
        "ls: cannot access '/etc/x': No such file or directory\n"
    )


async def build(backend: DockerBackend, dockerfile: str) -> Source:
    context = {
        "environment/Dockerfile": TaskFile(0o644, dockerfile.encode()),
        "environment/data/given.txt": TaskFile(0o644, b"given\n"),
    }
    return await backend.build(dockerfile, context, 100.0)


async def test_a_whole_dockerfile_is_built_and_starts_boxes(backend: DockerBackend) -> None:
    source = await build(
        backend,
        "FROM scratch AS first\nRUN echo one > /one\nFROM muster/host-base\nARG WHAT=two\n"
        'COPY --from=first /one /made/\nCOPY data /made\nENV COLOUR="light blue"\n'
        'RUN echo $WHAT \\\n > /made/two\nWORKDIR /made\nENTRYPOINT ["/nowhere"]\n',
    )
    await backend.start("a", Limits(), source)
    found = await told(backend, "a", "pwd; ls; cat one two given.txt; echo $COLOUR")
    assert found == "/made\ngiven.txt\none\ntwo\none\ntwo\ngiven\nlight blue\n"


@pytest.mark.parametrize(
    ("dockerfile", "why", "value"),
    [
        ("FROM scratch\nRUN echo said; exit 3\n", "said", "echo said; exit 3"),
        ("FROM ubuntu:24.04\n", "no base for that image", "ubuntu:24.04"),
        ("FROM scratch\nNONSENSE here\n", "NONSENSE", ""),
        ("FROM scratch\nVOLUME /data\n", "VOLUME", "VOLUME"),
        ("FROM scratch\nRUN exec 3<>/dev/tcp/1.1.1.1/53\n", "unreachable", "exec 3"),
    ],
)
async def test_a_dockerfile_that_does_not_build_is_refused_with_its_line(
    dockerfile: str, why: str, value: str, backend: DockerBackend
) -> None:
    dockerfile = dockerfile.replace("RUN exec", 'SHELL ["/bin/bash", "-c"]\nRUN exec')
    with pytest.raises(InvalidInput, match=why) as caught:
        await build(backend, dockerfile)
    assert value in caught.value.value
    assert caught.value.way_out
