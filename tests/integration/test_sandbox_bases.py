"""Boxes from root file systems of their own, as a folder and as a tarball."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from muster.errors import InvalidInput
from muster.types import Limits
from services.sandbox.adapters.native.backend import NativeBackend, open_native
from services.sandbox.adapters.native.basestore import folder_digest, prepare
from services.sandbox.bases import NATIVE, Bases, read
from services.sandbox.box import BoxFailure, Evidence, JudgeSpec, PutFile, Source
from services.sandbox.config import SandboxConfig
from services.sandbox.driver import SandboxHost
from tests.contract import hosts

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="native boxes need root"),
]
ENV = {"PATH": "/usr/bin:/bin", "HOME": "/root"}
TOOLS = "bash env cat ls mkdir rm cp chmod sleep head touch seq mv ln true id stat python3".split()
LEFT_OUT = ("test", "__pycache__", "dist-packages", "ensurepip", "idlelib", "lib2to3", "tkinter")


def build_root(root: Path) -> Path:
    """A root file system with the tools above and their libraries, and nothing else."""
    for folder in ("usr/bin", "usr/lib", "etc", "opt/given", "var/log"):
        (root / folder).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to("usr/lib" if name != "bin" else "usr/bin")
    programs = [Path(os.path.realpath(f"/usr/bin/{name}")) for name in TOOLS]
    for name, program in zip(TOOLS, programs, strict=True):
        shutil.copy(program, root / "usr/bin" / name)
    found = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=True).stdout
    for word in {word for word in found.split() if word.startswith("/") and ":" not in word}:
        # `/lib64/ld-linux…` and `/lib/x86_64-linux-gnu/…`: all three are one folder here.
        target = root / "usr/lib" / Path(word).relative_to("/").as_posix().partition("/")[2]
        target = root / "usr/lib" / str(target.relative_to(root / "usr/lib")).removeprefix("lib/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(word, target)
    library = Path(os.path.realpath("/usr/bin/python3")).name
    shutil.copytree(
        f"/usr/lib/{library}", root / "usr/lib" / library, ignore=shutil.ignore_patterns(*LEFT_OUT)
    )
    (root / "usr/bin/sh").symlink_to("bash")
    (root / "etc/os-release").write_text("NAME=Small\n")
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/bash\n")
    (root / "usr/bin/given").write_text("#!/bin/bash\necho given\n")
    (root / "usr/bin/given").chmod(0o4755)
    return root


@pytest.fixture(scope="module")
def small_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_root(tmp_path_factory.mktemp("base") / "root")


@asynccontextmanager
async def opened(folder: Path, bases: dict[str, str]) -> AsyncIterator[tuple[NativeBackend, Bases]]:
    prepared = await prepare(read(bases, NATIVE), folder / "bases")
    async with open_native(folder / "run", bases=prepared.folders) as backend:
        yield backend, Bases(prepared.names)


@pytest.fixture
async def backend(tmp_path: Path, small_root: Path) -> AsyncIterator[NativeBackend]:
    async with opened(tmp_path, {"small:*": str(small_root)}) as (made, bases):
        await made.start("a", Limits(), Source(bases.base_for("small:1")))
        await made.set_session("a", "/app", dict(ENV))
        yield made


def output(found: Evidence) -> str:
    return (found.head + found.tail).decode("utf-8", "replace")


async def told(backend: NativeBackend, command: str, box: str = "a") -> str:
    return output(await backend.run(box, command, 20))


async def test_a_box_has_the_root_file_system_that_it_was_given(backend: NativeBackend) -> None:
    assert (
        await told(backend, "cat /etc/os-release; given; ls /opt") == "NAME=Small\ngiven\ngiven\n"
    )
    assert (await backend.run("a", "ls /usr/bin/perl /usr/share", 10)).exit_code != 0
    assert await told(backend, "python3 -c 'print(6 * 7)'") == "42\n"


async def test_what_a_root_file_system_lacks_is_made_in_the_box_alone(
    backend: NativeBackend, small_root: Path
) -> None:
    made = "echo x > /tmp/x; cat /tmp/x /proc/self/comm; echo y > /dev/null; ls -d /run /root; pwd"
    assert await told(backend, made) == "x\ncat\n/root\n/run\n/app\n"
    names = ["bin", "etc", "lib", "lib64", "opt", "usr", "var"]
    assert sorted(os.listdir(small_root)) == names


async def test_everything_may_be_changed_and_the_base_stays_as_it_is(
    backend: NativeBackend, small_root: Path
) -> None:
    before = folder_digest(small_root)
    change = (
        "echo more >> /etc/os-release; cp /usr/bin/cat /usr/bin/dog; rm -r /opt; "
        "chmod 700 /usr/bin/given; mv /usr/bin/head /usr/bin/top; mkdir /new && cat /etc/os-release"
    )
    assert await told(backend, change) == "NAME=Small\nmore\n"
    assert await told(backend, "echo dog | dog; ls /opt 2>/dev/null || echo gone") == "dog\ngone\n"
    assert folder_digest(small_root) == before


async def test_another_box_of_the_same_base_sees_none_of_it(
    backend: NativeBackend, small_root: Path
) -> None:
    await told(backend, "rm -rf /usr/bin/given /opt; echo spoiled > /etc/os-release")
    base = f"sha256:{folder_digest(small_root)}"
    await backend.start("b", Limits(), Source(base))
    assert await told(backend, "cat /etc/os-release; given", "b") == "NAME=Small\ngiven\n"


async def test_the_rights_of_files_in_a_base_are_the_agent_s_own(backend: NativeBackend) -> None:
    # A set-user-id bit of the base gives nobody anything: the mounts are nosuid.
    found = await told(backend, "while read -r l; do case $l in *' / / '*) echo $l;; esac; done"
                       " < /proc/self/mountinfo")  # fmt: skip
    assert "nosuid" in found
    assert "nodev" in found


JUDGE = """\
cat /etc/os-release; given; type -P cat
for tool in cat given bash env python3; do
  [ -w /usr/bin/$tool ] && touch /usr/bin/$tool 2>/dev/null && echo "writable $tool"
done
python3 -I -c 'print(1)' > /logs/verifier/reward.txt
"""


async def test_what_an_agent_did_to_its_tools_does_not_reach_the_verifier(
    backend: NativeBackend,
) -> None:
    trojan = (
        "echo answer > /app/answer; printf '#!/bin/bash\\necho trojan\\n' > /usr/bin/given;"
        "cp /usr/bin/true /usr/bin/python3; cp /usr/bin/true /usr/bin/cat;"
        "echo NAME=Trojan > /etc/os-release; rm -rf /usr/lib/python3*"
    )
    await told(backend, trojan)
    assert await told(backend, "given; rm /bin; mkdir /bin; touch /bin/bash") == "trojan\n"
    await backend.seal("a")
    script = PutFile("/tests/test.sh", 0o755, JUDGE.encode())
    spec = JudgeSpec((script,), "/tests/test.sh", "/app", dict(ENV), 20, Limits())
    judged = await backend.judge("a", spec)
    assert output(judged.evidence) == "NAME=Small\ngiven\n/usr/bin/cat\n"
    assert judged.files == {"reward.txt": b"1\n"}


async def test_the_verifier_has_what_the_set_up_installed(tmp_path: Path, small_root: Path) -> None:
    async with opened(tmp_path, {"small": str(small_root)}) as (backend, bases):
        base = bases.base_for("small:latest")
        await backend.start("setup", Limits(), Source(base))
        install = "printf '#!/bin/bash\\necho tool\\n' > /usr/bin/tool; chmod 755 /usr/bin/tool"
        await backend.run("setup", install, 20)
        await backend.snapshot("setup", "L-1", keep=False)
        await backend.start("a", Limits(), Source(base, "L-1"))
        await backend.set_session("a", "/app", dict(ENV))
        assert await told(backend, "tool; echo 'echo trojan' > /usr/bin/tool; tool") == (
            "tool\ntrojan\n"
        )
        await backend.seal("a")
        script = PutFile("/tests/test.sh", 0o755, b"tool > /logs/verifier/reward.txt")
        spec = JudgeSpec((script,), "/tests/test.sh", "/app", dict(ENV), 20, Limits())
        assert (await backend.judge("a", spec)).files == {"reward.txt": b"tool\n"}


async def test_a_tarball_is_a_base_under_its_digest(tmp_path: Path, small_root: Path) -> None:
    packed = tmp_path / "small.tar.gz"
    with tarfile.open(packed, "w:gz", compresslevel=1) as archive:
        archive.add(small_root, ".")
    digest = hashlib.sha256(packed.read_bytes()).hexdigest()
    settings = {"small": f"{packed}@sha256:{digest}", "*": "host"}
    async with opened(tmp_path, settings) as (backend, bases):
        assert bases.base_for("small") == f"sha256:{digest}"
        await backend.start("a", Limits(), Source(bases.base_for("small")))
        assert await told(backend, "given; stat -c %a /usr/bin/given") == "given\n755\n"
        await backend.start("b", Limits(), Source(bases.base_for("other")))
        assert (await backend.run("b", "given", 10)).exit_code == 127
    again = await prepare(read(settings, NATIVE), tmp_path / "bases")
    assert again.folders == {f"sha256:{digest}": str(tmp_path / f"bases/{digest}/root")}


async def test_a_base_that_lost_its_shell_is_refused_by_name_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    root = tmp_path / "root"
    (root / "usr/bin").mkdir(parents=True)
    async with open_native(tmp_path / "run", bases={"sha256:x": str(root)}) as backend:
        for name in ("a", "a"):  # the failed start left nothing in the way
            with pytest.raises(BoxFailure, match=r"base sha256:x .* no /usr/bin/bash"):
                await backend.start(name, Limits(), Source("sha256:x"))
        with pytest.raises(BoxFailure, match="sha256:unknown"):
            await backend.start("a", Limits(), Source("sha256:unknown"))
        await backend.start("a", Limits())
        assert await told(backend, "echo on") == "on\n"


async def test_a_folder_that_took_the_place_of_another_is_the_one_that_boxes_see(
    tmp_path: Path, small_root: Path
) -> None:
    root = tmp_path / "root"
    shutil.copytree(small_root, root, symlinks=True)
    async with open_native(tmp_path / "run", bases={"sha256:x": str(root)}) as backend:
        await backend.start("a", Limits(), Source("sha256:x"))
        shutil.rmtree(root)
        with pytest.raises(BoxFailure, match="No such file"):
            await backend.start("b", Limits(), Source("sha256:x"))
        shutil.copytree(small_root, root, symlinks=True)
        await backend.start("c", Limits(), Source("sha256:x"))
        assert await told(backend, "given", "c") == "given\n"


async def test_a_base_may_hold_links_that_lead_out_and_none_is_followed(
    tmp_path: Path, small_root: Path
) -> None:
    root = tmp_path / "linked"
    shutil.copytree(small_root, root, symlinks=True)
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("mnt", "home", "srv"):
        (root / name).symlink_to(outside)
    async with opened(tmp_path, {"linked": str(root)}) as (backend, bases):
        await backend.start("a", Limits(), Source(bases.base_for("linked")))
        assert await told(backend, "touch /mnt/x 2>/dev/null || echo no") == "no\n"
        await backend.put("a", (PutFile("/data/x", 0o644, b"1"),))
    assert os.listdir(outside) == []


BUILD = """\
FROM small:1
WORKDIR /job
ENV COLOUR=green
USER root
COPY given.txt /etc/given/
RUN echo "#!/bin/bash" > /usr/bin/tool && echo "cat /etc/given/given.txt" >> /usr/bin/tool
RUN chmod 755 /usr/bin/tool && id -u > who && echo $COLOUR >> who
"""
CHECK = "tool > /logs/verifier/reward.txt; cat /job/who"


async def test_the_lines_of_a_dockerfile_change_usr_and_etc_of_the_task_s_boxes_alone(
    tmp_path: Path, small_root: Path
) -> None:
    settings = {"small:*": str(small_root)}
    before = folder_digest(small_root)
    async with (
        opened(tmp_path, settings) as (backend, bases),
        SandboxHost(backend, SandboxConfig(), "host", bases) as host,
    ):
        box = (await hosts.acquire(host, dockerfile=BUILD, test=CHECK)).box
        assert await hosts.step(host, box, 0, "tool; cat who; pwd") == "given\n0\ngreen\n/job\n"
        await hosts.step(
            host, box, 1, "echo 'echo 1' > /usr/bin/tool; echo 1 > /etc/given/given.txt"
        )
        judged = await host.verify(hosts.KEY, box)
        # The tool is the task's own; what it prints is no number, so no reward was bought.
        assert "holds no reward: 'given" in judged.verdict.detail
        plain = (await hosts.acquire(host, hosts.key(sibling=1), dockerfile="FROM scratch\n")).box
        assert "not found" in await hosts.step(host, plain, 0, "tool", episode=hosts.key(sibling=1))
    assert folder_digest(small_root) == before


async def test_an_image_that_the_host_does_not_know_is_refused_at_acquire(tmp_path: Path) -> None:
    async with (
        opened(tmp_path, {}) as (backend, bases),
        SandboxHost(backend, SandboxConfig(), "host", bases) as host,
    ):
        with pytest.raises(InvalidInput, match="no base for that image") as caught:
            await hosts.acquire(host, dockerfile="FROM nixos/nix:2.18\n")
        assert caught.value.value == "nixos/nix:2.18"
