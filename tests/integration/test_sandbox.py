"""Real boxes: steps and sessions that only a real shell can try, and what a kill leaves."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from muster.archive import TaskFile, pack_files
from muster.errors import HostUnfit, NotFound
from muster.types import EpisodeKey, Limits, StepLimit
from services.sandbox.adapters.native import hostcheck
from services.sandbox.adapters.native.backend import NativeBackend, instance_of, open_native
from services.sandbox.box import Evidence, JudgeSpec, PutFile
from services.sandbox.config import SandboxConfig
from services.sandbox.driver import SandboxHost
from services.sandbox.ledger import which_limit

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="native boxes need root"),
]
ENV = {"PATH": "/usr/bin:/bin", "HOME": "/root"}


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[NativeBackend]:
    async with open_native(tmp_path / "run") as made:
        await made.start("a", Limits())
        await made.set_session("a", "/app", dict(ENV))
        yield made


def output(found: Evidence) -> str:
    return (found.head + found.tail).decode("utf-8", "replace")


async def told(backend: NativeBackend, command: str, timeout_s: float = 20) -> str:
    return output(await backend.run("a", command, timeout_s))


async def test_a_server_in_the_background_neither_holds_the_step_nor_dies(
    backend: NativeBackend,
) -> None:
    serve = "python3 -c 'import http.server as h; h.test(h.SimpleHTTPRequestHandler, port=8000)' &"
    assert (await backend.run("a", serve, 20)).wall_s < 15
    fetch = (
        "for i in $(seq 100); do exec 3<>/dev/tcp/127.0.0.1/8000 && break; sleep 0.1; done"
        " 2>/dev/null; printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3; head -n 1 <&3"
    )
    assert "200 OK" in await told(backend, fetch)


async def test_a_background_writer_is_not_stopped_by_the_end_of_its_step(
    backend: NativeBackend,
) -> None:
    # More than a pipe holds, after the step that began it has returned.
    await told(backend, "(sleep 0.2; head -c 1M /dev/zero; echo done > /app/written) & exit 0")
    waited = "for i in $(seq 100); do test -e written && break; sleep 0.1; done; cat written"
    assert await told(backend, waited) == "done\n"


async def test_300_megabytes_of_output_keep_their_ends(backend: NativeBackend) -> None:
    found = await backend.run("a", "echo first; yes | head -c 300M; echo last", 60)
    assert found.total == len("first\nlast\n") + (300 << 20)
    assert found.head.startswith(b"first\ny\n")
    assert found.tail.endswith(b"y\nlast\n")


async def test_input_is_empty_and_pagers_do_not_wait(backend: NativeBackend) -> None:
    found = await backend.run("a", "cat; read -r x || echo end", 10)
    assert output(found) == "end\n"


@pytest.mark.parametrize(
    "spoil",
    [
        "rm -rf /run/muster/*; mkdir /run/muster/state",
        "mkfifo /run/muster/state; trap - EXIT; exit 0",
        "trap - EXIT; ln -sf /dev/zero /run/muster/state",
        "trap - EXIT; echo 'exit 3' > /run/muster/state",
        "trap - EXIT; head -c 400k /dev/zero > /run/muster/state",
        "export BASH_ENV=/app/evil; echo 'exit 9' > /app/evil",
        "export PATH=/nowhere",
        "mkdir gone; cd gone; rmdir ../gone",
        "exec sleep 0",
        "kill -9 $$",
        "set -e; false",
        "if then (",
    ],
)
async def test_a_spoiled_session_goes_on(spoil: str, backend: NativeBackend) -> None:
    await backend.run("a", spoil, 10)
    found = await backend.run("a", "echo on", 10)
    assert (found.exit_code, output(found)) == (0, "on\n")


async def test_a_variable_too_long_to_be_carried_takes_no_other_with_it(
    backend: NativeBackend,
) -> None:
    await told(backend, "export COLOUR=blue")
    await told(backend, "export BIG=$(head -c 200000 /dev/zero | tr '\\0' x)")
    assert await told(backend, "echo $COLOUR $HOME ${BIG:-unset}") == "blue /root unset\n"


async def test_variables_with_any_content_are_carried(backend: NativeBackend) -> None:
    await told(backend, """export ODD=$'two\\nlines "quoted" $HOME = ü'; export -n HOME""")
    assert await told(backend, 'printf "%s|%s" "$ODD" "${HOME-unset}"') == (
        'two\nlines "quoted" $HOME = ü|unset'
    )


@pytest.mark.parametrize(
    ("command", "limit"),
    [
        ("sleep 60", StepLimit.TIME),
        ("python3 -c 'bytearray(400 << 20)'", StepLimit.MEMORY),
        ("head -c 100M /dev/zero > /tmp/fill", StepLimit.DISK),
        ("for i in $(seq 5000); do : > /tmp/$i || exit 1; done 2>/dev/null", StepLimit.DISK),
        (
            "python3 -c '\nimport os, time\nfor i in range(99):\n  os.fork() or time.sleep(9)'",
            StepLimit.PIDS,
        ),
        ("exit 9", StepLimit.NONE),
        ("kill -9 $$", StepLimit.NONE),
    ],
)
async def test_the_limit_that_ended_a_step_is_named_and_the_next_step_runs(
    command: str, limit: StepLimit, backend: NativeBackend
) -> None:
    found = await backend.run("a", command, 2 if limit is StepLimit.TIME else 30)
    assert which_limit(found) is limit
    assert await told(backend, "kill -9 -1 2>/dev/null; rm -rf /tmp/*; echo on") == "on\n"


async def test_processor_time_is_that_of_the_step(backend: NativeBackend) -> None:
    busy = await backend.run("a", "i=0; while ((i < 300000)); do ((i += 1)); done", 60)
    idle = await backend.run("a", "sleep 0.3", 10)
    assert busy.cpu_s > 4 * idle.cpu_s


async def test_a_box_whose_shell_is_gone_is_broken_and_is_judged_all_the_same(
    backend: NativeBackend,
) -> None:
    await told(backend, "echo 1 > /app/done; rm -rf /lib64 /lib /bin")
    assert (await backend.run("a", "echo on", 10)).broken
    await backend.seal("a")
    script = PutFile("/tests/test.sh", 0o755, b"cat /app/done > /logs/verifier/reward.txt")
    spec = JudgeSpec((script,), "/tests/test.sh", "/app", dict(ENV), 20, Limits())
    assert (await backend.judge("a", spec)).files == {"reward.txt": b"1\n"}


async def test_a_caller_that_leaves_does_not_get_its_answer_mixed_with_the_next(
    backend: NativeBackend,
) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await backend.run("a", "echo one; sleep 0.5", 10)
    assert await told(backend, "echo two") == "two\n"


async def test_releasing_a_box_ends_its_verification(
    backend: NativeBackend, tmp_path: Path
) -> None:
    texts = {
        "instruction.md": b"Wait.",
        "environment/Dockerfile": b"FROM scratch\n",
        "tests/test.sh": b"sleep 77004.5",
    }
    archive = pack_files({path: TaskFile(0o644, text) for path, text in texts.items()})
    digest = hashlib.sha256(archive).hexdigest()
    key = EpisodeKey("run", "g", 0, 1, 1)
    traces = Traces(tmp_path / "none", "77004.5")
    async with SandboxHost(backend, SandboxConfig(), "host") as host, asyncio.timeout(30):
        box = (await host.acquire(key, "t", digest, archive, Limits(0, 0, 0, 0, 0), 20)).box

        async def verify() -> None:
            with pytest.raises(NotFound):
                await host.verify(key, box)

        async with asyncio.TaskGroup() as tasks:
            verifying = tasks.create_task(verify())
            while not await asyncio.to_thread(traces.processes):
                assert not verifying.done()
            assert await host.release(key, box)
        assert traces.processes() == []


async def test_orphans_are_reaped(backend: NativeBackend) -> None:
    await told(backend, "for i in $(seq 20); do (sleep 0.05 &) ; done; sleep 0.5")
    assert await told(backend, "ps -eo stat | grep -c Z || true") == "0\n"


async def test_a_second_host_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    async with open_native(tmp_path / "run"):
        with pytest.raises(HostUnfit, match="another sandbox host"):
            async with open_native(tmp_path / "run"):
                pass


async def test_the_host_check_starts_a_real_box() -> None:
    findings = await hostcheck.check()
    assert [f.what for f in findings if not f.well] == []
    assert hostcheck.told(findings)[-1] == "This host can isolate boxes."


SERVICE = textwrap.dedent(
    """
    import asyncio, os, sys
    from pathlib import Path
    from muster.types import Limits
    from services.sandbox.adapters.native.backend import open_native
    from services.sandbox.box import BoxFailure

    async def step(backend, name, command):
        try:
            await backend.run(name, command, 500)
        except BoxFailure:
            pass  # ended under it

    async def main():
        async with open_native(Path(sys.argv[1])) as backend, asyncio.TaskGroup() as tasks:
            for number in range(20):
                name = f"b{number}"
                cpus = 0.5 if backend.limits_cpu and number % 2 else 0.0
                await backend.start(name, Limits(cpus=cpus))
                await backend.set_session(name, "/app", {"PATH": "/usr/bin:/bin"})
                await backend.run(name, f"setsid sleep {sys.argv[2]} & echo x > /tmp/x", 20)
                if number % 2:
                    command = f"trap '' TERM; sleep {sys.argv[2]}"
                    tasks.create_task(step(backend, name, command))
            await asyncio.sleep(0.2)
            for number in range(5):
                await backend.end(f"b{number}")
            print(backend.keeper_pid, flush=True)
            if sys.argv[3] == "stop":
                for number in range(5, 20):
                    await backend.end(f"b{number}")
                return
            await asyncio.sleep(1000)

    asyncio.run(main())
    """
)


class Traces:
    """Everything on this machine that belongs to one instance."""

    def __init__(self, folder: Path, marker: str):
        self._folder, self._marker = folder, marker

    def processes(self) -> list[str]:
        found = []
        for entry in Path("/proc").iterdir():
            try:
                command = (entry / "cmdline").read_bytes().decode("utf-8", "replace")
            except OSError:
                continue
            ours = str(self._folder) in command or f"sleep\0{self._marker}" in command
            if ours and entry.name.isdecimal() and int(entry.name) != os.getpid():
                found.append(f"{entry.name}: {command}")
        return found

    def mounts(self) -> list[str]:
        found = []
        for entry in Path("/proc").glob("[0-9]*/mountinfo"):
            try:
                lines = entry.read_text("utf-8").splitlines()
            except OSError:
                continue
            found += [line for line in lines if str(self._folder) in line]
        return found

    def groups(self) -> list[str]:
        return [
            path
            for path, _, _ in os.walk("/sys/fs/cgroup")
            if f"/muster-{instance_of(self._folder / 'run')}" in path
        ]

    def boxes(self) -> set[str]:
        roots = [path for path in self.groups() if Path(path).name.startswith("muster-")]
        return {box.name for root in roots for box in Path(root).iterdir() if box.is_dir()}

    def files(self) -> list[str]:
        return sorted(str(path) for path in self._folder.rglob("*"))

    def all(self) -> dict[str, list[str]]:
        found = {
            "processes": self.processes(),
            "mounts": self.mounts(),
            "groups": self.groups(),
            "files": self.files(),
        }
        return {kind: items for kind, items in found.items() if items}


def launch(folder: Path, marker: str, how: str) -> tuple[subprocess.Popen[str], int]:
    """The service process, with 15 boxes left, every second of them in a step; keeper's pid."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVICE, str(folder / "run"), marker, how],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert process.stdout is not None
    keeper = int(process.stdout.readline())
    process.stdout.close()
    return process, keeper


async def emptied(traces: Traces, within_s: float) -> dict:
    """What is left; empty as soon as nothing is."""
    deadline = time.monotonic() + within_s
    left = traces.all()
    while left and time.monotonic() < deadline:
        await asyncio.to_thread(time.sleep, 0.05)
        left = traces.all()
    return left


async def test_a_stopped_host_leaves_nothing(tmp_path: Path) -> None:
    traces = Traces(tmp_path, "77001.5")
    process, _ = launch(tmp_path, "77001.5", "stop")
    assert process.wait(60) == 0
    assert traces.all() == {}


async def test_after_sigkill_of_the_service_nothing_is_left(tmp_path: Path) -> None:
    traces = Traces(tmp_path, "77002.5")
    process, _ = launch(tmp_path, "77002.5", "wait")
    assert {"processes", "groups", "mounts"} <= traces.all().keys()
    process.kill()
    process.wait()
    assert await emptied(traces, 20) == {}


async def test_after_sigkill_of_service_and_keeper_the_next_start_sweeps(tmp_path: Path) -> None:
    traces = Traces(tmp_path, "77003.5")
    process, keeper = launch(tmp_path, "77003.5", "wait")
    os.kill(keeper, signal.SIGKILL)
    process.kill()
    process.wait()
    async with open_native(tmp_path / "run") as backend:
        await backend.start("next", Limits())
        assert traces.processes() != []  # the new keeper
        left = [line for line in traces.processes() if "sleep" in line]
        assert left == []
        assert traces.boxes() == {"next"}
    assert await emptied(traces, 10) == {}
