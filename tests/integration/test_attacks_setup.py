"""What PID 1 does for the service by a path that others chose: no link leads it out of the box.

PID 1 has rights of the host and descriptors of its cgroups; its /proc/1/fd would lead a COPY, a
WORKDIR, a fork or the next step to them. The control is that they are there to be reached.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from muster.errors import InvalidInput
from muster.types import Limits
from services.sandbox.adapters.native.backend import NativeBackend, instance_of, open_native
from services.sandbox.box import PutFile, Source
from services.sandbox.config import SandboxConfig
from services.sandbox.driver import SandboxHost
from tests.contract.hosts import acquire, key, step
from tests.integration.native_world import ENV, children, fresh, told

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="native boxes need root"),
]
NUMBERS = range(3, 40)
# By PID 1's descriptors, by those of whatever process follows the link, to them and above them.
PLANT = (
    f"for i in $(seq {NUMBERS[0]} {NUMBERS[-1]}); do for who in 1 self; do"
    " ln -s /proc/$who/fd/$i /$who-$i; ln -s /proc/$who/fd/$i/../.. /$who-$i-up; done; done;"
    " ln -s /proc/1/root /1-root; ln -s /proc/1/cwd /1-cwd; ln -s /proc/self/root /self-root"
)
LINKS = [f"/{who}-{i}{up}" for who in ("1", "self") for i in NUMBERS for up in ("", "-up")]


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[NativeBackend]:
    async with open_native(tmp_path / "run") as made:
        await fresh(made, "neighbour")
        await fresh(made, "a")
        yield made


async def unharmed(backend: NativeBackend, folder: Path) -> None:
    """The neighbour lives, and nothing new is in the cgroups of this host's boxes."""
    assert await told(backend, "neighbour", "echo on") == "on\n"
    group = f"/muster-{instance_of(folder / 'run')}"
    groups = [path for path, _, _ in os.walk("/sys/fs/cgroup") if group in path]
    assert groups
    assert not [path for path in groups if "stolen" in path]


def reachable(backend: NativeBackend) -> list[int]:
    """The numbers under which the first processes of boxes hold folders of cgroups."""
    found = []
    for pid in children(backend.keeper_pid):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            # Outside of the box's own view, as the kernel names it.
            if link.is_dir() and (link / "cgroup.kill").exists():
                found.append(int(link.name))
    return found


async def test_a_copied_file_goes_through_no_link_out_of_the_box(
    backend: NativeBackend, tmp_path: Path
) -> None:
    await told(backend, "a", PLANT)
    assert set(reachable(backend)) & set(NUMBERS), "there is nothing to reach: proves nothing"
    for link in LINKS:
        for name in ("cgroup.kill", "stolen/x"):
            with pytest.raises(InvalidInput, match=r"leads|lies"):
                await backend.put("a", (PutFile(f"{link}/{name}", 0o644, b"1"),))
    await unharmed(backend, tmp_path)
    assert await backend.alive("a")


async def test_a_working_folder_goes_through_no_link_out_of_the_box(
    backend: NativeBackend, tmp_path: Path
) -> None:
    await told(backend, "a", PLANT)
    for link in LINKS:
        with pytest.raises(InvalidInput, match=r"leads|lies"):
            await backend.set_session("a", f"{link}/stolen", dict(ENV))
    await unharmed(backend, tmp_path)


def left(cwd: str) -> str:
    """A step that leaves this as the folder of the next one."""
    return f"trap - EXIT; printf '{cwd}\\0PATH=/usr/bin:/bin\\0' > /run/muster/state"


async def test_the_next_step_begins_in_no_folder_outside_of_the_box(
    backend: NativeBackend,
) -> None:
    await told(backend, "a", PLANT)
    for link in LINKS:
        await told(backend, "a", left(link))
        assert await told(backend, "a", "pwd -P; test -e cgroup.procs && echo out") == "/\n", link
    for link in ("/1-root", "/1-cwd"):
        await told(backend, "a", left(link))
        assert await told(backend, "a", "pwd -P") == "/\n"


async def test_a_fork_makes_no_folder_that_the_agent_names_and_starts_all_the_same(
    backend: NativeBackend, tmp_path: Path
) -> None:
    await told(backend, "a", f"{PLANT}; mkdir /app/gone; echo x > /file; mkfifo /pipe")
    folders = [f"/1-{i}-up/stolen{i}" for i in NUMBERS[:12]]
    folders += ["/file/in", "/pipe", "/app/gone", "/" + "long/" * 900, "/proc/1/fd", "/usr/new"]
    for number, folder in enumerate(folders):
        await told(backend, "a", left(folder) + "; rmdir /app/gone 2>/dev/null")
        made = await backend.snapshot("a", f"L-{number}", keep=True)
        box = f"f{number}"
        await backend.start(box, Limits(), Source(layer=f"L-{number}"))
        await backend.set_session(box, made.cwd, made.env)
        assert await told(backend, box, "pwd -P; ls -d /app") == "/\n/app\n", folder
        await backend.end(box)
    await unharmed(backend, tmp_path)


async def test_a_copied_file_follows_the_links_of_the_box_as_they_lead_in_it(
    backend: NativeBackend,
) -> None:
    plant = "mkdir -p /srv/real; cd /; ln -s srv/real near; ln -s /srv/real far; echo old > /srv/x;"
    await told(backend, "a", f"{plant} ln -s ../../../../srv/real up; ln -s x /srv/to-x")
    await backend.put(
        "a",
        (
            PutFile("/near/one", 0o600, b"1"),
            PutFile("/far/new/two", 0o755, b"2"),
            PutFile("/up/three", 0o644, b"3"),
            PutFile("/srv/to-x", 0o640, b"4"),
        ),
    )
    look = "cd /srv; cat real/one real/new/two real/three x; stat -c %a real/one real/new/two x"
    assert await told(backend, "a", look) == "1234600\n755\n640\n"
    await backend.set_session("a", "/far/deep/er", dict(ENV))
    assert await told(backend, "a", "pwd -P") == "/srv/real/deep/er\n"


@pytest.mark.parametrize(
    ("plant", "path", "why"),
    [
        ("mkfifo /at", "/at", "FIFO"),
        ("mkdir /at", "/at", "is a folder already"),
        ("echo x > /at", "/at/in", "no folder"),
        ("ln -s /nowhere /at", "/at/in", "link to nothing"),
        ("ln -s at /at", "/at/in", "in a circle"),
        ("true", "/usr/at", "cannot write"),
        ("true", "/proc/sys/kernel/at", r"cannot write|leads"),
    ],
)
async def test_what_cannot_be_copied_is_the_author_s_to_mend(
    plant: str, path: str, why: str, backend: NativeBackend
) -> None:
    await told(backend, "a", plant)
    with pytest.raises(InvalidInput, match=why) as caught:
        await backend.put("a", (PutFile(path, 0o644, b"1"),))
    assert caught.value.field == "environment/Dockerfile"
    assert await backend.alive("a")


async def test_a_box_cannot_change_the_program_of_its_first_process(
    backend: NativeBackend,
) -> None:
    # In a base of its own, a shell that begins with `#!/proc/self/exe` has the kernel open it.
    firsts = children(backend.keeper_pid)
    assert firsts
    for pid in (backend.keeper_pid, *firsts):
        program = f"/proc/{pid}/exe"
        with pytest.raises(OSError, match="Read-only"):
            os.chmod(program, os.stat(program).st_mode)
    assert os.access(sys.executable, os.X_OK)
    mine = f"/proc/{os.getpid()}/exe"
    os.chmod(mine, os.stat(mine).st_mode)


@pytest.mark.parametrize("line", ["COPY given.txt /e/cgroup.kill", "WORKDIR /e/stolen"])
async def test_an_author_s_set_up_is_refused_and_ends_no_box_of_others(
    line: str, tmp_path: Path
) -> None:
    config = SandboxConfig(warm_max=0)
    async with open_native(tmp_path / "run") as made, SandboxHost(made, config, "h") as host:
        neighbour = (await acquire(host)).box
        assert await step(host, neighbour, 0, "echo on") == "on\n"
        numbers = reachable(made)
        assert numbers, "there is nothing to reach: proves nothing"
        for turn, number in enumerate(numbers, 1):
            evil = f"FROM scratch\nRUN ln -s /proc/1/fd/{number}/../.. /e\n{line}\n"
            with pytest.raises(InvalidInput) as caught:
                await acquire(host, key(sibling=turn), dockerfile=evil)
            assert caught.value.field == "environment/Dockerfile"
            assert await step(host, neighbour, turn, "echo on") == "on\n"
