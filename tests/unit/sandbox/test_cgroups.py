"""Where the controllers are, over /proc of three kinds of hosts; groups in plain folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.sandbox.adapters.native.cgroups import CgroupTrouble, Tree, find
from services.sandbox.adapters.native.hierarchies import Hierarchies, Place

# /proc/self/mountinfo and /proc/self/cgroup, shortened to what is not about cgroups at all.
SYSTEMD_V2 = """\
24 30 0:22 / /sys rw,nosuid,nodev,noexec,relatime shared:7 - sysfs sysfs rw
25 24 0:6 / /sys/kernel/security rw,nosuid,nodev,noexec,relatime shared:8 - securityfs sec rw
35 24 0:30 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate
"""
SYSTEMD_V2_OWN = "0::/system.slice/muster-sandbox.service\n"

LEGACY_V1 = """\
31 24 0:26 / /sys/fs/cgroup ro,nosuid,nodev,noexec shared:9 - tmpfs tmpfs ro,mode=755
34 31 0:29 / /sys/fs/cgroup/systemd rw,nosuid shared:11 - cgroup cgroup rw,xattr,name=systemd
37 31 0:32 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:15 - cgroup cgroup rw,cpu,cpuacct
40 31 0:35 / /sys/fs/cgroup/memory rw,nosuid shared:18 - cgroup cgroup rw,memory
42 31 0:37 / /sys/fs/cgroup/pids rw,nosuid shared:20 - cgroup cgroup rw,pids
"""
HYBRID_V2 = "33 31 0:28 / /sys/fs/cgroup/unified rw,nosuid shared:10 - cgroup2 cgroup2 rw\n"
LEGACY_OWN = "9:pids:/user.slice\n5:memory:/user.slice\n2:cpu,cpuacct:/user.slice\n1:name=x:/\n"

MICRO_VM = """\
23 27 0:22 / /sys rw,relatime - sysfs sysfs rw
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
33 31 0:30 / /sys/fs/cgroup/cpuacct rw,relatime - cgroup cgroup rw,cpuacct
34 31 0:31 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
39 31 0:36 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
MICRO_VM_OWN = "8:pids:/\n4:memory:/job/7\n3:cpuset:/\n2:cpuacct:/\n1:cpu:/\n0::/\n"
V2_DOCKER = (
    "612 601 0:29 /../../.. /sys/fs/cgroup ro,nosuid,nodev,noexec - cgroup2 cgroup rw,nsdelegate\n"
)


def where(found: Hierarchies) -> dict[str, str]:
    places = {"kill": found.kill, "memory": found.memory, "pids": found.pids, "cpu": found.cpu}
    return {name: f"v{2 if p.v2 else 1} {p.directory}" for name, p in places.items() if p}


def test_a_v2_host_has_all_in_one_tree() -> None:
    found = find(SYSTEMD_V2, SYSTEMD_V2_OWN, "cpuset cpu io memory hugetlb pids rdma misc")
    ours = "v2 /sys/fs/cgroup/system.slice/muster-sandbox.service"
    assert where(found) == dict.fromkeys(("kill", "memory", "pids", "cpu"), ours)


def test_a_v1_host_is_refused_for_what_cannot_be_killed_as_a_whole() -> None:
    with pytest.raises(CgroupTrouble, match="no cgroup2") as caught:
        find(LEGACY_V1, LEGACY_OWN, "")
    assert "mount -t cgroup2" in caught.value.way_out


def test_a_hybrid_host_kills_in_v2_and_limits_in_v1() -> None:
    found = find(LEGACY_V1 + HYBRID_V2, LEGACY_OWN + "0::/user.slice\n", "")
    assert where(found) == {
        "kill": "v2 /sys/fs/cgroup/unified/user.slice",
        "memory": "v1 /sys/fs/cgroup/memory/user.slice",
        "pids": "v1 /sys/fs/cgroup/pids/user.slice",
        "cpu": "v1 /sys/fs/cgroup/cpu,cpuacct/user.slice",
    }


def test_each_controller_is_at_its_own_group_of_this_process() -> None:
    found = find(MICRO_VM, MICRO_VM_OWN, "hugetlb")
    assert where(found) == {
        "kill": "v2 /sys/fs/cgroup/unified",
        "memory": "v1 /sys/fs/cgroup/memory/job/7",
        "pids": "v1 /sys/fs/cgroup/pids",
        "cpu": "v1 /sys/fs/cgroup/cpu",
    }


def test_a_controller_in_v2_goes_before_the_same_in_v1() -> None:
    found = find(MICRO_VM, MICRO_VM_OWN, "memory")
    assert where(found)["memory"] == "v2 /sys/fs/cgroup/unified"
    assert where(found)["pids"] == "v1 /sys/fs/cgroup/pids"


def test_a_container_s_mount_of_another_part_is_used_from_its_top() -> None:
    found = find(V2_DOCKER, "0::/\n", "cpu memory pids")
    assert where(found)["kill"] == "v2 /sys/fs/cgroup"


def test_a_host_without_the_cpu_controller_is_taken() -> None:
    assert find(SYSTEMD_V2, SYSTEMD_V2_OWN, "memory pids").cpu is None


def place(folder: Path, *, v2: bool) -> Place:
    folder.mkdir(parents=True)
    return Place(str(folder), str(folder), v2)


def test_a_processor_limit_without_the_controller_is_refused_with_the_way_out(
    tmp_path: Path,
) -> None:
    kill = place(tmp_path / "v2", v2=False)
    tree = Tree("i", Hierarchies(kill, kill, kill))
    assert not tree.limits_cpu
    with pytest.raises(CgroupTrouble, match="no cpu controller") as caught:
        tree.add_box("a", 0, 0, 1.5)
    assert "mount -t cgroup -o cpu" in caught.value.way_out
    assert tree.groups("a").joins == [str(tmp_path / "v2/muster-i/a/agent/cgroup.procs")]


@pytest.mark.parametrize(
    ("v2", "written"),
    [
        (True, {"cpu.max": "150000 100000"}),
        (False, {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "150000"}),
    ],
)
def test_a_processor_limit_is_a_quota_of_each_period(
    v2: bool, written: dict[str, str], tmp_path: Path
) -> None:
    base = place(tmp_path / "base", v2=False)
    cpu = place(tmp_path / "cpu", v2=v2)
    groups = Tree("i", Hierarchies(base, base, base, cpu)).groups("a")
    # Plain files stand for the kernel's, which are there as soon as a group is made.
    groups = type(groups)(
        groups.kill, groups.memory, groups.pids, False, False, str(tmp_path / "cpu/a"), v2
    )
    agent = tmp_path / "cpu/a/agent"
    agent.mkdir(parents=True)
    (tmp_path / "cpu/a/cgroup.subtree_control").touch()
    for name in written:
        (agent / name).touch()
    groups.limit_cpu(1.5)
    assert {name: (agent / name).read_text() for name in written} == written
    assert (str(agent / "cgroup.procs") in groups.joins) is not v2


def test_the_least_quota_is_what_the_kernel_takes(tmp_path: Path) -> None:
    base = place(tmp_path / "base", v2=False)
    cpu = place(tmp_path / "cpu/a/agent", v2=False)
    (Path(cpu.directory) / "cpu.cfs_period_us").touch()
    (Path(cpu.directory) / "cpu.cfs_quota_us").touch()
    groups = Tree("i", Hierarchies(base, base, base)).groups("a")
    type(groups)("", "", "", False, False, str(tmp_path / "cpu/a"), False).limit_cpu(0.0001)
    assert (Path(cpu.directory) / "cpu.cfs_quota_us").read_text() == "1000"


def test_a_quota_that_the_kernel_refuses_names_the_way_out(tmp_path: Path) -> None:
    base = place(tmp_path / "base", v2=False)
    (tmp_path / "cpu/a/agent/cpu.cfs_period_us").mkdir(parents=True)  # no write goes there
    groups = Tree("i", Hierarchies(base, base, base)).groups("a")
    limited = type(groups)("", "", "", False, False, str(tmp_path / "cpu/a"), False)
    with pytest.raises(CgroupTrouble, match="cannot limit a box to 2 processors") as caught:
        limited.limit_cpu(2)
    assert "ask for fewer" in caught.value.way_out
