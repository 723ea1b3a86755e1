"""Tasks whose Dockerfile only an image builder can read: refused, or placed where one is."""

from __future__ import annotations

import msgspec
import pytest

from muster.archive import TaskFile, pack_files
from muster.errors import InvalidInput
from muster.taskset import Task, task_from_archive
from services.router import builders
from services.router import events as e
from services.router.fleet import Fleet
from services.router.policy import Placement
from tests.unit.router.test_machine import silent
from tests.unit.router.world import World, job

BUILDER, NATIVE = {"builds": "dockerfile"}, {"builds": "", "backend": "native"}
HOSTS = (e.Host("n", "n:1"), e.Host("d", "d:1", builds=True))


TEXTS = {
    "instruction.md": "Make it.",
    "environment/Dockerfile": "FROM scratch\n",
    "tests/test.sh": "echo 1 > /logs/verifier/reward.txt",
}


def task(unbuildable: str = "") -> Task:
    archive = pack_files({path: TaskFile(0o644, text.encode()) for path, text in TEXTS.items()})
    read = task_from_archive(archive, name="made")
    return msgspec.structs.replace(read, unbuildable=unbuildable)


def test_a_task_that_no_host_can_build_is_refused_by_its_line() -> None:
    with pytest.raises(InvalidInput, match="line 3: ARG") as caught:
        builders.check([task(), task("line 3: ARG")], [NATIVE, {}])
    assert (caught.value.field, caught.value.value) == ("environment/Dockerfile", "made")
    assert "docker" in caught.value.way_out


@pytest.mark.parametrize(
    ("unbuildable", "hosts"),
    [("line 3: ARG", [NATIVE, BUILDER]), ("", [NATIVE]), ("", [])],
    ids=["a host builds", "nothing to build", "no host yet"],
)
def test_any_other_task_is_taken(unbuildable: str, hosts: list[dict[str, str]]) -> None:
    builders.check([task(unbuildable)], hosts)


def test_such_a_task_gets_its_box_only_where_one_can_be_built() -> None:
    fleet = Fleet(Placement(2, 1.5))
    fleet.hosts_are(HOSTS)
    assert {fleet.pick_host(0.0, builds=True) for _ in range(3)} == {"d"}
    assert fleet.pick_host(0.0, builds=True, avoid="d") == "d"
    fleet.hosts_are(HOSTS[:1])
    assert fleet.pick_host(0.0, builds=True) == ""


def test_an_episode_waits_for_such_a_host() -> None:
    world = World().on(e.AcquireBox, silent)
    plain = job(size=2)
    info = msgspec.structs.replace(plain.job.tasks[0], builds=True)
    wanted = e.JobSubmitted(msgspec.structs.replace(plain.job, tasks=(info,)))
    world.feed(wanted).start().wait(1.0)
    assert not world.sent(e.AcquireBox)
    told = world.machine.progress(plain.job.id, world.now)
    assert told is not None
    assert "builds images" in told.waiting_for
    world.feed(e.HostsListed(HOSTS)).wait(1.0)
    assert {c.host for c in world.sent(e.AcquireBox)} == {"d"}
