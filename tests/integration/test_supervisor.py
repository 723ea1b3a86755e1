"""The supervisor with real processes: stand-ins that do nothing, and a real server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from muster.supervise import procfs, state
from tests.integration.terminals import terminal, terminal_of

_RUN = str(Path(__file__).parent / "supervised" / "run.py")


class Supervised:
    """A supervisor process and what it says."""

    def __init__(self, state_dir: Path, *modes: str, **how: Any) -> None:
        self.state_dir = state_dir
        self.process = subprocess.Popen(
            [sys.executable, _RUN, str(state_dir), *modes], stdout=subprocess.PIPE, text=True, **how
        )

    def until(self, **wanted: object) -> dict[str, Any]:
        """The next line that has these values; the test's timeout bounds the wait."""
        assert self.process.stdout is not None
        seen = []
        for text in self.process.stdout:
            line: dict[str, Any] = json.loads(text)
            seen.append(line)
            if wanted.items() <= line.items():
                return line
        raise AssertionError(f"it ended without saying {wanted}: {seen}")

    def until_ready(self, *names: str) -> None:
        left = set(names)
        while left:
            left.discard(self.until(phase="ready")["service"])

    def processes(self) -> list[procfs.Identity]:
        """Guards, services and all that descends from them."""
        holding = state.read(self.state_dir)
        assert holding is not None
        guards = {child.guard.pid for child in holding.children.values() if child.guard}
        mine = (pid for pid in procfs.pids() if guards & set(_ancestors(pid)))
        return [who for who in map(procfs.identify, mine) if who]

    def pid(self, name: str) -> int:
        holding = state.read(self.state_dir)
        assert holding is not None
        process = holding.children[name].process
        assert process is not None
        return process.pid

    def interrupt(self) -> dict[str, Any]:
        self.process.send_signal(signal.SIGINT)
        return self.until(interrupted=True)


def _ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        yield pid
        try:
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return
        pid = int(stat[1])


Supervise = Callable[..., Supervised]


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Supervise]:
    started: list[Supervised] = []

    def start(*modes: str, **how: Any) -> Supervised:
        started.append(Supervised(tmp_path / "state", *modes, **how))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()
        assert one.process.stdout is not None
        one.process.stdout.close()
    state.sweep(tmp_path / "state")


def _command(who: procfs.Identity) -> str:
    return Path(f"/proc/{who.pid}/cmdline").read_text()


def _left(processes: list[procfs.Identity]) -> list[procfs.Identity]:
    return [who for who in processes if procfs.alive(who)]


def test_ctrl_c_ends_services_and_their_orphans_and_removes_the_sockets(
    supervise: Supervise, tmp_path: Path
) -> None:
    run = supervise("serve", "orphans")
    run.until_ready("redis", "s0", "s1")
    processes = run.processes()
    assert len(processes) == 7  # three guards, three services, an orphan
    ended = run.interrupt()
    assert (ended["status"], ended["line"]) == (0, "")
    assert run.process.wait() == 0
    assert _left(processes) == []
    assert not state.runtime_dir(tmp_path / "state").exists()
    assert state.read(tmp_path / "state") is None


def test_services_have_groups_of_their_own_in_the_session_of_the_supervisor(
    supervise: Supervise,
) -> None:
    """A session each would be a scheduling group each (docs/adr/0020-one-session.md); one group
    would be hit by Ctrl-C as a whole; one that asks a terminal in the background is stopped."""
    with terminal() as on_it:
        run = supervise("serve", **on_it)
        run.until_ready("redis", "s0")
        assert terminal_of(run.process.pid) != 0
        assert {terminal_of(who.pid) for who in run.processes()} == {0}
    services = [run.pid("redis"), run.pid("s0")]
    assert {os.getsid(pid) for pid in services} == {os.getsid(run.process.pid)}
    groups = {os.getpgid(pid) for pid in (*services, run.process.pid)}
    assert len(groups) == 3


def test_a_service_that_ignores_sigterm_is_killed(supervise: Supervise) -> None:
    run = supervise("stubborn")
    run.until_ready("redis", "s0")
    processes = run.processes()
    assert run.interrupt()["status"] == 0
    assert _left(processes) == []


def test_a_killed_service_comes_back_and_its_new_pid_is_recorded(supervise: Supervise) -> None:
    run = supervise("serve")
    run.until_ready("redis", "s0")
    first = run.pid("s0")
    os.kill(first, signal.SIGKILL)
    restarting = run.until(service="s0", phase="restarting")
    assert "status 137" in restarting["detail"]
    run.until_ready("s0")
    assert run.pid("s0") != first
    holding = state.read(run.state_dir)
    assert holding is not None
    assert holding.children["s0"].starts == 2


def test_a_crash_at_the_start_is_told_and_tried_again(supervise: Supervise) -> None:
    run = supervise("once")
    assert "RuntimeError: planted" in run.until(service="s0", phase="restarting")["detail"]
    run.until_ready("s0")


def test_a_persons_message_is_shown_as_it_stands_and_ends_everything(supervise: Supervise) -> None:
    run = supervise("serve", "refuse")
    ended = run.until(status=2)
    assert ended["line"] == "s1: s1.listen = '127.0.0.1:1': taken → choose another"


def test_a_killed_supervisor_takes_every_process_with_it(supervise: Supervise) -> None:
    run = supervise("serve", "orphans")
    run.until_ready("redis", "s0", "s1")
    processes = run.processes()
    run.process.kill()
    run.process.wait()
    assert procfs.wait_gone(processes, timeout_s=10.0) == []


def test_the_next_supervisor_ends_what_a_killed_one_and_its_killed_guards_left(
    supervise: Supervise, tmp_path: Path
) -> None:
    run = supervise("orphans-of-ours")
    run.until_ready("redis", "s0")
    processes = run.processes()
    [orphan] = [who for who in processes if _command(who).startswith("/usr/bin/sleep")]
    holding = state.read(run.state_dir)
    assert holding is not None
    run.process.send_signal(signal.SIGSTOP)  # it shall not see its guards die
    for child in holding.children.values():
        assert child.guard is not None
        os.kill(child.guard.pid, signal.SIGKILL)
    run.process.kill()
    run.process.wait()
    successor = supervise("serve")
    assert f"ended process {orphan.pid}" in successor.until()["cleared"]
    assert not procfs.alive(orphan)
    successor.until_ready("redis", "s0")
    assert successor.interrupt()["status"] == 0
    assert successor.process.wait() == 0
    assert not state.runtime_dir(tmp_path / "state").exists()


def test_a_second_supervisor_in_the_same_folder_is_refused(
    supervise: Supervise, tmp_path: Path
) -> None:
    run = supervise()
    run.until_ready("redis")
    second = subprocess.run(
        [sys.executable, _RUN, str(tmp_path / "state")], capture_output=True, text=True
    )
    assert "another muster is running with this state folder" in second.stderr
    assert f"process {run.process.pid}" in second.stderr
    assert run.interrupt()["status"] == 0


def test_when_the_leader_is_killed_its_standby_leads_at_once_and_the_other_stands_by(
    supervise: Supervise,
) -> None:
    run = supervise("pair")
    run.until_ready("redis", "router")
    assert "stands by" in run.until(service="router-2", phase="ready")["detail"]
    first = state.router_address(run.state_dir)
    os.kill(run.pid("router"), signal.SIGKILL)
    # Before the dead one's heartbeat would have run out, so before the restarted one came to ask.
    told = [run.until(phase="ready"), run.until(phase="ready")]
    assert [line["service"] for line in told] == ["router-2", "router"]
    assert "leads now" in told[0]["detail"]
    assert "stands by" in told[1]["detail"]
    assert state.router_address(run.state_dir) not in ("", first)
    assert run.interrupt()["status"] == 0


def test_a_leader_that_was_stopped_for_long_is_refused_and_comes_back_as_the_standby(
    supervise: Supervise,
) -> None:
    run = supervise("pair")
    run.until_ready("redis", "router", "router-2")
    former = run.pid("router")
    os.kill(former, signal.SIGSTOP)
    assert "leads now" in run.until(service="router-2", phase="ready")["detail"]
    os.kill(former, signal.SIGCONT)
    assert "a newer router leads" in run.until(service="router", phase="restarting")["detail"]
    assert "stands by" in run.until(service="router", phase="ready")["detail"]
    assert run.interrupt()["status"] == 0


def test_a_torn_append_only_file_is_told_and_a_damaged_one_ends_the_start(
    supervise: Supervise,
) -> None:
    run = supervise("serve")
    run.until_ready("redis", "s0")
    run.interrupt()
    run.process.wait()
    [file] = (run.state_dir / "redis" / "appendonlydir").glob("*.aof")
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    torn = supervise("serve")
    assert "torn" in torn.until(service="redis", phase="ready")["detail"]
    torn.interrupt()
    torn.process.wait()
    file.write_bytes(b"*" + bytes(20) + whole)
    ended = supervise("serve").until(status=2)
    assert "damaged in the middle" in ended["line"]
    assert "exec -a valkey-check-aof" in ended["line"]
