"""A service of native boxes that does as it is told, as a process that can be killed.

    python -m tests.integration.sandbox_owner FOLDER ORPHAN_S ANSWERS_KEPT

Each line on stdin names a method of the backend: {"id", "call", "args", "named"}; its result goes
to stdout as {"id", "result" or "error"}. The end of stdin is an orderly stop.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from muster.errors import MusterError
from muster.types import Limits
from services.sandbox.adapters.native.backend import NativeBackend, instance_of, open_native
from services.sandbox.box import HOST, BoxFailure, JudgeSpec, PutFile, Source

ROOT = Path(__file__).parents[2]


class Owner:
    """The process as a test sees it."""

    def __init__(self, process: asyncio.subprocess.Process):
        self.process = process
        self.keeper = 0  # its process
        self._asked = 0
        self._answers: dict[int, Any] = {}

    async def begin(self, call: str, *args: Any, **named: Any) -> int:
        """Ask, and do not wait; the number of the question."""
        assert self.process.stdin
        self._asked += 1
        line = {"id": self._asked, "call": call, "args": args, "named": named}
        self.process.stdin.write(msgspec.json.encode(line) + b"\n")
        await self.process.stdin.drain()
        return self._asked

    async def answer(self, number: int) -> Any:
        """What came of a question; raises AssertionError with the error's words."""
        assert self.process.stdout
        async with asyncio.timeout(60):
            while number not in self._answers:
                line = await self.process.stdout.readline()
                assert line, f"the owner ended with status {await self.process.wait()}"
                found = msgspec.json.decode(line)
                self._answers[found["id"]] = found
        found = self._answers.pop(number)
        assert "error" not in found, found["error"]
        return found["result"]

    async def call(self, call: str, *args: Any, **named: Any) -> Any:
        return await self.answer(await self.begin(call, *args, **named))

    async def box(self, name: str, note: str = "") -> None:
        """A box with a session, and a note if it is to outlive this owner."""
        await self.call("start", name)
        await self.call("set_session", name, "/app", {"PATH": "/usr/bin:/bin"})
        if note:
            await self.call("note", name, note)

    async def step(self, box: str, turn: int, command: str) -> str:
        """The output of a step that ends well."""
        found = await self.call("run", box, command, 30, turn)
        assert found["exit_code"] == 0, found
        return str(found["output"])

    async def survivors(self) -> dict[str, Any]:
        return {found["box"]: found for found in await self.call("survivors")}

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()

    async def stop(self) -> int:
        """An orderly stop; its exit status."""
        assert self.process.stdin
        self.process.stdin.close()
        async with asyncio.timeout(60):
            return await self.process.wait()


@asynccontextmanager
async def owner(
    folder: Path,
    orphan_s: float = 60.0,
    *,
    kept: int = 16,
    before: tuple[str, ...] = (),
    cwd: Path | None = None,
    code: Path = ROOT,
) -> AsyncIterator[Owner]:
    """One that serves, by `code`; `before`: a command in front of it. Killed with the block if it
    lives."""
    process = await asyncio.create_subprocess_exec(
        *(*before, sys.executable, "-m", "tests.integration.sandbox_owner"),
        *(str(folder), str(orphan_s), str(kept)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=cwd or code,
        env=os.environ | {"PYTHONPATH": str(code)},
        limit=16 << 20,
    )
    found = Owner(process)
    try:
        found.keeper = await found.call("keeper")
        yield found
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            await found.kill()


def traces(folder: Path) -> dict[str, list[str]]:
    """What boxes of this folder leave anywhere on the machine, by kind."""
    group = f"muster-{instance_of(folder)}"
    mounts, processes = [], []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            lines = (path / "mountinfo").read_text("utf-8").splitlines()
            mounts += [line for line in lines if str(folder) in line]
            if group in (path / "cgroup").read_text("utf-8"):
                processes.append(f"{path.name} {(path / 'comm').read_text('utf-8').strip()}")
            elif str(folder).encode() in (path / "cmdline").read_bytes():
                if (path / "comm").read_text("utf-8").strip() == "muster-keeper":
                    processes.append(f"{path.name} muster-keeper")
        except OSError:
            continue  # it has ended
    groups = [path for path, _, _ in os.walk("/sys/fs/cgroup") if f"/{group}" in path]
    files = [str(found) for found in folder.rglob("*")] if folder.exists() else []
    return {"mounts": mounts, "processes": processes, "groups": groups, "files": files}


async def gone(folder: Path) -> dict[str, list[str]]:
    """What is left of boxes of this folder, once nothing is or after 30 seconds."""
    await asyncio.to_thread(_until, lambda: not any(traces(folder).values()))
    return traces(folder)


def marked(mark: str) -> list[int]:
    """Processes with this word in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (path / "cmdline").read_bytes().split(b"\0"):
                found.append(int(path.name))
        except OSError:
            continue
    return found


async def begun(mark: str, count: int = 1) -> None:
    """Until so many processes of that mark are there."""
    assert await asyncio.to_thread(_until, lambda: len(marked(mark)) >= count)


async def ended(mark: str) -> None:
    """Until none is."""
    assert await asyncio.to_thread(_until, lambda: not marked(mark))


def _until(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not (found := true()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


class _Calls:
    """What a line may name; results are plain."""

    def __init__(self, backend: NativeBackend):
        self._backend = backend

    async def keeper(self) -> int:
        return self._backend.keeper_pid

    async def start(self, box: str, layer: str = "") -> None:
        source = Source("host", layer) if layer else HOST
        await self._backend.start(box, Limits(output_bytes=1 << 20), source)

    async def set_session(self, box: str, cwd: str, env: dict[str, str]) -> None:
        await self._backend.set_session(box, cwd, env)

    async def note(self, box: str, text: str, times: int = 1, shared: str = "") -> None:
        await self._backend.note(box, text.encode() * times, shared.encode())

    async def run(self, box: str, command: str, timeout_s: float, turn: int) -> Any:
        return _plain(await self._backend.run(box, command, timeout_s, turn))

    async def rejoin(self, box: str) -> Any:
        return _plain(await self._backend.rejoin(box))

    async def survivors(self) -> Any:
        return [_plain(found) for found in await self._backend.survivors()]

    async def stopping(self) -> None:
        await self._backend.stopping()

    async def claim(self, layers: list[str]) -> None:
        await self._backend.claim(tuple(layers))

    async def snapshot(self, box: str, layer: str, keep: bool) -> None:
        await self._backend.snapshot(box, layer, keep=keep)

    async def seal(self, box: str) -> None:
        await self._backend.seal(box)

    async def judge(self, box: str, script: str) -> str:
        """The reward that the script writes."""
        file = PutFile("/tests/test.sh", 0o755, script.encode())
        env = {"PATH": "/usr/bin:/bin"}
        spec = JudgeSpec((file,), "/tests/test.sh", "/app", env, 60, Limits())
        return (await self._backend.judge(box, spec)).files["reward.txt"].decode()

    async def end(self, box: str) -> bool:
        return await self._backend.end(box)


def _plain(found: msgspec.Struct) -> Any:
    """Fields, with bytes as text."""
    plain = {}
    for name in found.__struct_fields__:
        value = getattr(found, name)
        if isinstance(value, bytes):
            value = value.decode("utf-8", "replace")
        if name == "kept":
            value = [_plain(step) for step in value]
        plain[name] = _plain(value) if name == "evidence" else msgspec.to_builtins(value)
    if "head" in plain:
        plain["output"] = plain["head"] + plain["tail"]
    return plain


async def _serve(folder: Path, orphan_s: float, kept: int) -> None:
    reader = asyncio.StreamReader(limit=16 << 20)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with open_native(folder, orphan_s=orphan_s, answers_kept=kept) as backend:
        calls = _Calls(backend)

        async def obey(asked: dict[str, Any]) -> None:
            answer: dict[str, Any] = {"id": asked["id"]}
            try:
                answer["result"] = await getattr(calls, asked["call"])(
                    *asked["args"], **asked["named"]
                )
            except (BoxFailure, MusterError) as failure:
                answer["error"] = str(failure)
            sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
            sys.stdout.buffer.flush()

        async with asyncio.TaskGroup() as tasks:
            running = []
            while line := await reader.readline():
                running.append(tasks.create_task(obey(msgspec.json.decode(line))))
            for task in running:
                task.cancel()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))
