"""A Docker Engine for tests: the machine's own when one runs, else one started for the session.

Owns: the daemon it starts, in a temporary folder, and the base image. Promise: no network, no
registry: the image is made from this machine's own bash, coreutils and python3; what was started
is stopped and what was made is removed. Does not cover: installing it (apt-get install docker.io).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.sandbox.adapters.docker.backend import DockerBackend
from services.sandbox.adapters.docker.opening import open_docker
from services.sandbox.config import SandboxConfig

IMAGE = "muster-test-base:2"
CACHE_VARIABLE = "MUSTER_TEST_DOCKER_BASE"  # a folder that keeps the base's tarball
_OWN_SOCKET = "/var/run/docker.sock"
_START_S = 40.0
_PACKAGES = (
    "bash", "coreutils", "sed", "grep", "findutils", "diffutils", "util-linux", "tar", "gzip",
    "dash", "python3-minimal", "python3.11-minimal", "libpython3.11-minimal",
    "libpython3.11-stdlib",
)  # fmt: skip
_SKIPPED = ("/usr/share/", "/etc/", "/var/", "/lib/systemd/", "/usr/lib/python3.11/test/")
_ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/sh\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
}


class NoEngine(Exception):
    """Why the tests of the docker backend cannot run here."""


@dataclass(frozen=True)
class Engine:
    """url: for aiodocker and DOCKER_HOST."""

    url: str

    def docker(self, *words: str, stdin: Path | None = None) -> str:
        """The command line client, for tests that look from outside; raises on failure."""
        call = ["docker", "-H", self.url, *words]
        source = stdin.open("rb") if stdin else None
        try:
            done = subprocess.run(call, stdin=source, capture_output=True, timeout=100, check=False)
        finally:
            if source:
                source.close()
        if done.returncode:
            raise NoEngine(f"{' '.join(call)}: {done.stderr.decode(errors='replace').strip()}")
        return done.stdout.decode()


def settings(found: Engine, **more: object) -> SandboxConfig:
    """For boxes of that engine."""
    bases = {name: f"image:{IMAGE}" for name in ("muster/host-base", "scratch")}
    return SandboxConfig.model_validate(
        {"backend": "docker", "docker_url": found.url, "bases": bases} | more
    )


def open_boxes(found: Engine, folder: Path) -> AbstractAsyncContextManager[DockerBackend]:
    """The docker backend on that engine."""
    return open_docker(settings(found), folder)


@contextmanager
def engine(folder: Path) -> Iterator[Engine]:
    """A running engine with the base image; raises NoEngine with the reason."""
    if not shutil.which("docker"):
        raise NoEngine("no Docker Engine is installed (apt-get install docker.io)")
    url = os.environ.get("DOCKER_HOST") or f"unix://{_OWN_SOCKET}"
    running = Engine(url)
    try:
        running.docker("version")
    except NoEngine:
        with own_daemon(folder) as started:
            _prepare(started, folder)
            yield started
        return
    _prepare(running, folder)
    yield running


@contextmanager
def own_daemon(folder: Path) -> Iterator[Engine]:
    """A daemon of our own, stopped at the end; raises NoEngine with the reason."""
    if os.geteuid() != 0 or not shutil.which("dockerd"):
        raise NoEngine("no Docker Engine runs, and one can be started by root only, with dockerd")
    home = folder / "engine"
    home.mkdir()
    found = Engine(f"unix://{home}/docker.sock")
    options = [
        f"--data-root={home}/data", f"--exec-root={home}/exec", f"--pidfile={home}/pid",
        f"--host={found.url}", "--bridge=none", "--iptables=false", "--ip6tables=false",
    ]  # fmt: skip
    with (home / "log").open("wb") as log:
        daemon = subprocess.Popen(
            # It ends with us, however we end. A network namespace of its own: a daemon without a
            # bridge removes the machine's docker0, which may be another daemon's.
            ["setpriv", "--pdeathsig", "TERM", "unshare", "--net", "dockerd", *options],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        _wait(found, daemon, home / "log")
        yield found
    finally:
        _stop(daemon, home)


def _wait(found: Engine, daemon: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            found.docker("version")
            return
        except NoEngine as error:
            if daemon.poll() is not None or time.monotonic() > deadline:
                tail = log.read_text(errors="replace")[-500:]
                raise NoEngine(f"dockerd does not start: {tail}") from error
            time.sleep(0.1)


def _stop(daemon: subprocess.Popen[bytes], home: Path) -> None:
    """It ends its containers and containerd itself; one that hangs is killed with its group."""
    daemon.terminate()
    try:
        daemon.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(daemon.pid, signal.SIGKILL)
        daemon.wait()
    for mount in _mounts_below(home):
        subprocess.run(["umount", "-l", mount], check=False, capture_output=True)
    shutil.rmtree(home, ignore_errors=True)


def _mounts_below(home: Path) -> list[str]:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return sorted(p for p in (n.split()[1] for n in lines) if p.startswith(f"{home}/"))[::-1]


def _prepare(found: Engine, folder: Path) -> None:
    """The base image; NoEngine where a container of it does not even start."""
    try:
        found.docker("image", "inspect", IMAGE)
    except NoEngine:
        found.docker("import", "-", IMAGE, stdin=base_tarball(folder))
    found.docker("run", "--rm", "--network=none", IMAGE, "/bin/bash", "-c", "true")


def base_tarball(folder: Path) -> Path:
    """The base's files; kept in the folder that the variable names, so made once."""
    path = Path(os.environ.get(CACHE_VARIABLE) or folder) / "muster-test-base-2.tar"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    with tarfile.open(part, "w") as archive:
        # One name each: before /usr was merged, packages listed some files in both places.
        for name, file in sorted({_merged(file): file for file in _files()}.items()):
            archive.add(file, name, recursive=False)
        for name in ("root", "tmp", "etc", "var", "dev", "proc", "sys", "run", "logs"):
            _add_folder(archive, name, 0o1777 if name == "tmp" else 0o755)
        for name in ("bin", "sbin", "lib", "lib64"):
            _add_link(archive, name, f"usr/{name}")
        for name, text in _ETC.items():
            (folder / name).write_text(text)
            archive.add(folder / name, f"etc/{name}")
    part.replace(path)
    return path


def _files() -> set[str]:
    """Every file of the packages, and the libraries that their programs need."""
    if not shutil.which("dpkg"):
        raise NoEngine("the base image is made of Debian's packages, and there is no dpkg")
    listed = subprocess.run(["dpkg", "-L", *_PACKAGES], capture_output=True, check=False, text=True)
    if listed.returncode:
        raise NoEngine(f"the base image lacks a package of Debian 12: {listed.stderr.strip()}")
    names = [name for name in listed.stdout.splitlines() if not name.startswith(_SKIPPED)]
    # The links that merge /usr are made apart; a folder's link would stand in its way.
    files = {name for name in names if os.path.isfile(name)}
    files.add("/usr/bin/sh")
    linked: set[str] = set()
    elves = [f for f in files if "/bin/" in f or f.endswith(".so") or "/sbin/" in f]
    for start in range(0, len(elves), 100):
        batch = elves[start : start + 100]
        told = subprocess.run(["ldd", *batch], capture_output=True, check=False, text=True)
        for word in told.stdout.split():
            if word.startswith("/") and not word.endswith(":"):
                linked |= {word, os.path.realpath(word)}
    return files | {name for name in linked if os.path.exists(name)}


def _merged(name: str) -> str:
    """The name below a merged /usr."""
    return ("usr" + name) if name.startswith(("/bin/", "/sbin/", "/lib")) else name[1:]


def _add_folder(archive: tarfile.TarFile, name: str, mode: int) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.mode = tarfile.DIRTYPE, mode
    archive.addfile(info)


def _add_link(archive: tarfile.TarFile, name: str, target: str) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = tarfile.SYMTYPE, target, 0o777
    archive.addfile(info)
