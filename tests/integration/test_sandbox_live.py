"""Verifiers beside a living box, and over a root file system that its agent could change."""

from __future__ import annotations

import os
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from muster.types import Limits
from services.sandbox.adapters.native.backend import NativeBackend, open_native
from services.sandbox.box import BoxFailure, Evidence, Judgement, JudgeSpec, PutFile, Source
from tests.integration import small_root

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="native boxes need root"),
]
ENV = {"PATH": "/usr/bin:/bin", "HOME": "/root"}
BASE = "sha256:small"
SERVER = """python3 -c '
import http.server
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"served")
http.server.HTTPServer(("127.0.0.1", 8000), Answer).serve_forever()
' >/dev/null 2>&1 &
until (exec 3<>/dev/tcp/127.0.0.1/8000) 2>/dev/null; do sleep 0.05; done"""
FETCH = """exec 3<>/dev/tcp/127.0.0.1/8000 || exit 7
printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3
grep -q served <&3 && echo 1 > /logs/verifier/reward.txt"""


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[NativeBackend]:
    bases = {BASE: str(small_root.make(tmp_path / "small"))}
    async with open_native(tmp_path / "run", bases=bases) as made:
        yield made


async def fresh(backend: NativeBackend, box: str, source: Source | None = None) -> None:
    await backend.start(box, Limits(), source or Source())
    await backend.set_session(box, "/app", dict(ENV))


async def told(backend: NativeBackend, box: str, command: str) -> str:
    return output(await backend.run(box, textwrap.dedent(command), 60))


def output(found: Evidence) -> str:
    return (found.head + found.tail).decode("utf-8", "replace")


async def judge(backend: NativeBackend, box: str, script: str, *, live: bool = False) -> Judgement:
    if not live:
        await backend.seal(box)
    test = PutFile("/tests/test.sh", 0o755, script.encode())
    spec = JudgeSpec((test,), "/tests/test.sh", "/", dict(ENV), 20, Limits(), live)
    return await backend.judge(box, spec)


async def test_a_live_verifier_reaches_the_service_that_the_agent_left_running(
    backend: NativeBackend,
) -> None:
    await fresh(backend, "a")
    await told(backend, "a", SERVER)
    assert (await judge(backend, "a", FETCH, live=True)).files == {"reward.txt": b"1\n"}
    assert (await judge(backend, "a", FETCH, live=True)).files == {"reward.txt": b"1\n"}  # again


async def test_a_sealed_verifier_finds_no_service(backend: NativeBackend) -> None:
    await fresh(backend, "a")
    await told(backend, "a", SERVER)
    judged = await judge(backend, "a", FETCH)
    assert (judged.files, judged.evidence.exit_code) == ({}, 7)


async def test_a_live_verifier_of_one_box_does_not_reach_another(backend: NativeBackend) -> None:
    for box in ("a", "b"):
        await fresh(backend, box)
    await told(backend, "a", SERVER)
    assert (await judge(backend, "b", FETCH, live=True)).evidence.exit_code == 7


async def test_agent_and_live_verifier_see_no_process_and_no_file_of_each_other(
    backend: NativeBackend,
) -> None:
    await fresh(backend, "a")
    await told(
        backend,
        "a",
        """
        mkdir -p /app/seen; echo secret > /app/secret
        # Looks at and kills everything for as long as it lives.
        (while :; do kill -9 -1; ls /proc >> /app/seen/proc; ls /tests /logs/verifier
         ipcs -q; done >> /app/seen/out 2>&1) & exit 0
        """,
    )
    script = """
    for i in 1 2 3 4 5; do sleep 0.2 || exit 9; done
    ls /proc | grep -c '^[0-9]'
    test -e /app && echo sees files
    ipcmk -Q >/dev/null
    echo 1 > /logs/verifier/reward.txt
    """
    judged = await judge(backend, "a", script, live=True)
    assert judged.files == {"reward.txt": b"1\n"}
    assert int(output(judged.evidence)) <= 4  # its own shell, ls, grep
    # The agent kills every step now, so its files tell what it saw.
    look = "grep -c self /app/seen/proc; grep -rE 'test.sh|reward|0x' /app/seen || echo nothing"
    looks, found = output((await judge(backend, "a", look)).evidence).splitlines()
    assert int(looks) > 5
    assert found == "nothing"


async def test_an_agent_cannot_put_files_before_a_live_verifier(backend: NativeBackend) -> None:
    await fresh(backend, "a")
    planting = """
    mkdir -p /logs/verifier /tests /usr/local 2>/dev/null
    echo 1 > /logs/verifier/reward.txt; echo 'exit 0' > /tests/test.sh
    rm /bin; mkdir /bin; printf '#!/usr/bin/bash\\necho evil' > /bin/sh; chmod 755 /bin/sh
    echo evil > /etc/answer
    """
    await told(backend, "a", planting)
    judged = await judge(backend, "a", "/bin/sh -c 'echo fine'; ls /etc/answer", live=True)
    assert output(judged.evidence).startswith("fine\nls: cannot access '/etc/answer'")
    assert judged.files == {}


async def test_a_live_verifier_ends_with_all_its_processes(backend: NativeBackend) -> None:
    await fresh(backend, "a")
    await judge(backend, "a", "setsid sleep 7788 & exit 0", live=True)
    left = [pid for pid in os.listdir("/proc") if pid.isdecimal() and "7788" in command(pid)]
    assert left == []
    assert await backend.alive("a")


def command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


async def test_a_box_from_a_root_file_system_sees_it_and_nothing_of_the_host(
    backend: NativeBackend,
) -> None:
    await fresh(backend, "a", Source(BASE))
    assert await told(backend, "a", "ls /usr/bin/python3 2>/dev/null; cat /etc/passwd") == (
        "root:x:0:0::/root:/bin/bash\n"
    )
    assert (
        await told(backend, "a", "touch /tmp/x /usr/x && ls /tmp /usr/x") == "/usr/x\n\n/tmp:\nx\n"
    )


TOOL = "printf '#!/bin/bash\\necho {}\\n' > /usr/bin/tool; chmod 755 /usr/bin/tool"


@pytest.mark.parametrize("live", [False, True])
async def test_tools_of_the_set_up_count_and_those_that_the_agent_put_there_do_not(
    live: bool, backend: NativeBackend
) -> None:
    await fresh(backend, "a", Source(BASE))
    await told(backend, "a", TOOL.format("set-up") + "; echo given > /etc/given")
    await backend.snapshot("a", "L-a", keep=False)
    await fresh(backend, "b", Source(BASE, "L-a"))
    evil = "cp /usr/bin/tool /usr/bin/cat; echo > /etc/given; touch /usr/bin/new; rm /usr/bin/ls"
    await told(backend, "b", f"{TOOL.format('agent')}; {evil}; mkdir /sbin; touch /sbin/mine")
    assert await told(backend, "b", "tool") == "agent\n"
    script = "tool; cat /etc/given; ls /usr/bin/new /sbin 2>&1; touch /usr/bin/x /etc/x 2>&1"
    lines = output((await judge(backend, "b", script, live=live)).evidence).splitlines()
    assert lines[:2] == ["set-up", "given"]
    assert sum("No such file" in line for line in lines) == 2
    assert sum("Read-only" in line for line in lines) == 2


async def test_a_verifier_of_a_bare_root_file_system_takes_its_tools_from_there(
    backend: NativeBackend,
) -> None:
    await fresh(backend, "a", Source(BASE))
    await told(backend, "a", "echo 1 > /app/answer; " + TOOL.format("agent") + "; rm -r /usr/bin")
    script = "ls /usr/bin/tool; cat /app/answer > /logs/verifier/reward.txt"
    judged = await judge(backend, "a", script)
    assert judged.files == {"reward.txt": b"1\n"}
    assert "No such file" in output(judged.evidence)


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("base", ["host", BASE])
async def test_no_verifier_writes_to_what_other_boxes_start_from(
    base: str, live: bool, backend: NativeBackend
) -> None:
    await fresh(backend, "a", Source(base))
    script = "for f in /etc /usr /usr/bin; do touch $f/forged; done; echo x > /etc/passwd"
    judged = await judge(backend, "a", script, live=live)
    assert output(judged.evidence).count("Read-only") == 4
    await fresh(backend, "b", Source(base))
    assert await told(backend, "b", "ls /etc/forged 2>/dev/null; cat /etc/passwd") != "x\n"


async def test_a_link_of_an_agent_s_where_the_next_box_is_mounted_leads_nowhere(
    backend: NativeBackend, tmp_path: Path
) -> None:
    await fresh(backend, "a", Source(BASE))
    # A base without /run: the folder is the box's own, and it can be moved away from under the
    # mount on it. On the host there is such a folder, for who follows the link.
    trap = tmp_path / "trap"
    os.mkdir(trap)
    await told(backend, "a", f"mv /run /gone && ln -s {trap} /run")
    moved = await told(backend, "a", "ls -d /gone /run")
    assert moved == "/gone\n/run\n"
    await backend.snapshot("a", "L-a", keep=True)
    await fresh(backend, "b", Source(BASE, "L-a"))
    await told(backend, "b", "export A=1")
    assert await told(backend, "b", "test -L /run || echo plain $A") == "plain 1\n"
    assert os.listdir(trap) == []


async def test_a_snapshot_lies_on_the_base_that_it_was_made_on(backend: NativeBackend) -> None:
    await fresh(backend, "a", Source(BASE))
    await backend.snapshot("a", "L-a", keep=False)
    with pytest.raises(BoxFailure, match="lies on base sha256:small, not host"):
        await backend.start("b", Limits(), Source("host", "L-a"))
    with pytest.raises(BoxFailure, match="no base sha256:other"):
        await backend.start("b", Limits(), Source("sha256:other"))
