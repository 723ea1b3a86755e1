"""Files into real boxes and out of them, against agents that plant links, pipes and races."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from muster.errors import InvalidInput
from muster.types import Limits
from services.sandbox.adapters.native.backend import NativeBackend, open_native
from services.sandbox.box import BoxFailure, CopiedFile

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="native boxes need root"),
]
ENV = {"PATH": "/usr/bin:/bin", "HOME": "/root"}
MANY = 8 << 20


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[NativeBackend]:
    async with open_native(tmp_path / "run") as made:
        await made.start("a", Limits())
        await made.set_session("a", "/app", dict(ENV))
        yield made


async def told(backend: NativeBackend, command: str) -> str:
    found = await backend.run("a", command, 20)
    assert found.exit_code == 0
    return (found.head + found.tail).decode()


async def test_a_folder_comes_back_as_it_went_in(backend: NativeBackend) -> None:
    sent = (
        CopiedFile("data", "folder", 0o750),
        CopiedFile("data/big", data=os.urandom(5 << 20)),
        CopiedFile("data/empty", mode=0o600),
        CopiedFile("data/in/deep/run.sh", mode=0o755, data=b"echo ran"),
        CopiedFile("data/link", "link", 0o777, link="in/deep/run.sh"),
        CopiedFile("data/in/up", "link", 0o777, link="../big"),
    )
    await backend.copy_in("a", "/app/new", sent)
    said = await told(backend, "sh new/data/link; stat -c %a new/data")
    assert said == "ran\n750\n"
    got = await backend.copy_out("a", "/app/new/data", MANY)
    found = {file.path: file for file in got if file.kind != "folder"}
    assert found == {file.path: file for file in sent if file.kind != "folder"}
    folders = {file.path: file.mode for file in got if file.kind == "folder"}
    assert folders == {"data": 0o750, "data/in": 0o755, "data/in/deep": 0o755}


async def test_one_file_is_copied_out_by_its_name(backend: NativeBackend) -> None:
    await told(backend, "printf 42 > answer.txt; chmod 4755 answer.txt")
    got = await backend.copy_out("a", "/app/answer.txt", 2)
    assert got == (CopiedFile("answer.txt", "file", 0o755, b"42"),)


@pytest.mark.parametrize(
    ("plant", "path", "why"),
    [
        ("true", "/app/none", "is not there"),
        ("mkfifo out/pipe", "/app/out", "FIFO"),
        (
            "python3 -c 'import socket as s; s.socket(s.AF_UNIX).bind(\"out/door\")'",
            "/app/out",
            "socket",
        ),
        ("ln -s /etc/passwd out/link", "/app/out", "absolute path"),
        ("ln -s ../../root out/link", "/app/out", "leads out"),
        ("mkdir out/in; ln -s . out/same; ln -s same/../.. out/in/link", "/app/out", "leads out"),
        ("ln -s out/x linked", "/app/linked", "is a link"),
        ("mkdir out/in; ln -s out linked", "/app/linked/in", "is a link or lies behind one"),
        ("ln -s /proc/self out/p", "/app/out/p/environ", "is a link or lies behind one"),
        ("true", "/proc/self/environ", "mount of its own"),
        ("true", "/dev/null", "mount of its own"),
        ("true", "/app/../etc", "'..'"),
        ("true", "app", "not an absolute path"),
        ("true", "/", "whole box"),
        ("head -c 200 /dev/zero > out/a; head -c 200 /dev/zero > out/b", "/app/out", "300 bytes"),
        ("truncate -s 1T out/sparse", "/app/out", "300 bytes"),
        ("printf x > $'out/\\xff'", "/app/out", "UTF-8"),
        ("cd out; for i in $(seq 70); do mkdir d; cd d; done", "/app/out", "64 folders"),
    ],
)
async def test_what_cannot_be_copied_out_is_refused_by_name(
    plant: str, path: str, why: str, backend: NativeBackend
) -> None:
    await told(backend, f"mkdir out; {plant}")
    with pytest.raises(InvalidInput, match=why) as caught:
        await backend.copy_out("a", path, 300)
    assert caught.value.field == "path"
    assert await told(backend, "echo on") == "on\n"


async def test_a_box_holds_no_device_that_could_be_copied(backend: NativeBackend) -> None:
    # The agent cannot make one; /dev itself is a mount, which no copy enters.
    await told(backend, "mkdir out; ! mknod out/disk b 1 1 2>/dev/null")


@pytest.mark.parametrize(
    ("file", "why"),
    [
        (CopiedFile("/etc/x", data=b"1"), "plain relative path"),
        (CopiedFile("../x", data=b"1"), "plain relative path"),
        (CopiedFile("a/../../x", data=b"1"), "plain relative path"),
        (CopiedFile("", data=b"1"), "plain relative path"),
        (CopiedFile("x", "link", link="/etc"), "absolute path"),
        (CopiedFile("x", "link", link=".."), "leads out"),
        (CopiedFile("a/x", "link", link="b/../../../c"), "leads out"),
        (CopiedFile("x", "device"), "is a device"),
        (CopiedFile("x", "fifo"), "is a fifo"),
    ],
)
async def test_what_would_lead_out_of_the_folder_is_refused_before_it_is_sent(
    file: CopiedFile, why: str, backend: NativeBackend
) -> None:
    with pytest.raises(InvalidInput, match=why):
        await backend.copy_in("a", "/app", (CopiedFile("first", data=b"1"), file))
    assert await told(backend, "ls /app") == ""


async def test_nothing_is_written_through_a_planted_link(backend: NativeBackend) -> None:
    await told(
        backend,
        "mkdir real; echo kept > real/x; ln -s real linked; ln -s real/x x; mkfifo pipe;"
        "mkdir taken; ln -s /app/real /away",
    )
    await backend.copy_in("a", "/app", (CopiedFile("x", data=b"1"), CopiedFile("pipe", data=b"2")))
    assert await told(backend, "cat real/x x pipe") == "kept\n12"
    for folder, path in (("/app", "linked/y"), ("/away", "y"), ("/app", "taken"), ("/proc", "y")):
        with pytest.raises(InvalidInput):
            await backend.copy_in("a", folder, (CopiedFile(path, data=b"3"),))
    assert await told(backend, "ls real") == "x\n"


async def test_a_copy_that_does_not_fit_is_refused_and_the_box_goes_on(
    backend: NativeBackend,
) -> None:
    await backend.start("small", Limits(disk_bytes=1 << 20))
    with pytest.raises(InvalidInput, match="disk limit"):
        await backend.copy_in("small", "/", (CopiedFile("big", data=bytes(3 << 20)),))
    assert await backend.alive("small")


RACE = """
mkdir -p /secret out/in; echo secret > /secret/x; echo fine > out/in/x; ln -s /secret other
cat > race.py <<'END'
import ctypes
swap, folder = ctypes.CDLL(None).renameat2, -100
assert swap(folder, b"/app/other", folder, b"/app/out/in", 2) == 0
while True:
    swap(folder, b"/app/other", folder, b"/app/out/in", 2)
END
python3 race.py >/dev/null 2>&1 & echo $!
"""


async def test_a_folder_swapped_for_a_link_during_a_copy_is_never_followed(
    backend: NativeBackend,
) -> None:
    racer = (await told(backend, RACE)).strip()
    swapped = whole = 0
    async with asyncio.timeout(60):
        while swapped < 20 or whole < 20:
            try:
                got = await backend.copy_out("a", "/app/out", MANY)
                whole += any(file.data == b"fine\n" for file in got)
                assert b"secret\n" not in [file.data for file in got]
            except InvalidInput:
                swapped += 1  # it saw the link, or the change
            try:
                await backend.copy_in("a", "/app/out", (CopiedFile("in/new", data=b"n"),))
            except InvalidInput:
                swapped += 1
    assert await told(backend, f"kill -9 {racer}; ls /secret") == "x\n"


async def test_the_agent_s_processes_cannot_hold_a_copy_for_ever(backend: NativeBackend) -> None:
    # They may stop or kill what copies, as root of their box; the copy then fails, the box lives.
    await told(backend, "mkdir out; for i in $(seq 3000); do echo $i > out/$i; done")
    stop = (
        "python3 -c '\nimport os, signal\nwhile True:\n  for pid in range(2, 4000):\n"
        "    if pid != os.getpid():\n      try: os.kill(pid, signal.SIGKILL)\n"
        "      except OSError: pass\n' >/dev/null 2>&1 &"
    )
    await told(backend, stop)
    try:
        await backend.copy_out("a", "/app/out", MANY)
    except BoxFailure as failure:
        assert "ended by a process of the box" in str(failure)  # noqa: PT017
    assert await backend.alive("a")


async def test_root_of_a_box_copies_out_what_no_mode_lets_anybody_read(
    backend: NativeBackend,
) -> None:
    await told(backend, "mkdir out; echo mine > out/x; chmod 0 out/x out")
    got = await backend.copy_out("a", "/app/out", MANY)
    assert [(f.mode, f.data) for f in got if f.kind == "file"] == [(0, b"mine\n")]


async def test_two_copies_at_once_do_not_mix(backend: NativeBackend) -> None:
    big = bytes(range(256)) * (5 << 12)  # several frames
    await told(backend, "mkdir one two")

    async def there_and_back(name: str, data: bytes) -> bytes:
        await backend.copy_in("a", f"/app/{name}", (CopiedFile("x", data=data),))
        [file] = await backend.copy_out("a", f"/app/{name}/x", MANY)
        return file.data

    async with asyncio.TaskGroup() as group:
        first = group.create_task(there_and_back("one", big))
        second = group.create_task(there_and_back("two", big[::-1]))
    assert (first.result(), second.result()) == (big, big[::-1])
