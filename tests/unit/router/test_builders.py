"""Tasks that no host can start are refused at the door; those that some can are placed there."""

from __future__ import annotations

import msgspec
import pytest

from muster import box_offer, dockerfile
from muster.archive import TaskFile, pack_files
from muster.box_offer import Offer
from muster.errors import InvalidInput
from muster.taskset import Task, task_from_archive
from muster.types import Limits
from services.router import builders
from services.router import events as e
from services.router.hosts import Hosts
from tests.unit.router.test_machine import silent
from tests.unit.router.world import World, job

BUILDER, NATIVE = {"builds": "dockerfile"}, {"builds": "", "backend": "native"}
NOTHING_ASKED = Limits(0, 0, 0, 0, 0)
SMALL = Offer(bases=("scratch", "ubuntu:*"), most=Limits(memory_bytes=512 << 20)).info()
LARGE = Offer(bases=("scratch",), most=Limits(memory_bytes=4 << 30, cpus=8.0)).info()
HOSTS = (e.Host("n", "n:1"), e.Host("d", "d:1", builds=True))


TEXTS = {
    "instruction.md": "Make it.",
    "environment/Dockerfile": "FROM scratch\n",
    "tests/test.sh": "echo 1 > /logs/verifier/reward.txt",
}


def task(unbuildable: str = "", **settings: object) -> Task:
    archive = pack_files({path: TaskFile(0o644, text.encode()) for path, text in TEXTS.items()})
    read = task_from_archive(archive, name="made")
    return msgspec.structs.replace(read, unbuildable=unbuildable, **settings)


def test_a_task_that_no_host_can_build_is_refused_by_its_line() -> None:
    with pytest.raises(InvalidInput, match="ARG is not supported") as caught:
        builders.check(
            [task(), task("file line 3: ARG is not supported")], [NATIVE, {}], NOTHING_ASKED
        )
    assert (caught.value.field, caught.value.value) == ("file line 3", "made")
    assert "docker" in caught.value.way_out


def test_packages_from_a_network_are_no_reason_to_look_for_a_builder() -> None:
    """An image builder has no network either."""
    recipe = dockerfile.parse("FROM x\nRUN apt-get install -y gcc")
    with pytest.raises(InvalidInput) as caught:
        builders.check([task(recipe.unbuildable)], [NATIVE], NOTHING_ASKED)
    assert "put it into the base" in caught.value.way_out
    assert "docker" not in caught.value.way_out.replace("environment/Dockerfile", "")


def test_an_image_that_no_host_knows_is_refused_with_the_words_of_the_host() -> None:
    unknown = task(base="nixos/nix:2.18")
    with pytest.raises(InvalidInput, match="no base for that image") as caught:
        builders.check([task(), unknown], [SMALL, LARGE], NOTHING_ASKED)
    assert (caught.value.field, caught.value.value) == (
        "environment/Dockerfile FROM",
        "nixos/nix:2.18",
    )
    assert 'sandbox.bases."nixos/nix:2.18"' in caught.value.way_out


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"memory_bytes": 8 << 30}, "environment.memory_mb"),
        ({"disk_bytes": 8 << 30}, "environment.storage_mb"),
        ({"cpus": 9.0}, "environment.cpus"),
    ],
)
def test_a_limit_above_every_host_is_refused(settings: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidInput, match="on this host") as caught:
        builders.check([task(**settings)], [LARGE], NOTHING_ASKED)
    assert caught.value.field == field


def test_the_router_s_own_limits_go_before_those_of_a_task() -> None:
    builders.check([task(memory_bytes=8 << 30)], [LARGE], Limits(1 << 30, 0, 0, 0, 0))
    with pytest.raises(InvalidInput) as caught:
        builders.check([task()], [LARGE], Limits(8 << 30, 0, 0, 0, 0))
    assert caught.value.field == "limits.memory_bytes"


def test_a_task_needs_one_host_that_has_all_it_wants() -> None:
    builders.check(
        [task(memory_bytes=2 << 30), task(base="ubuntu:24.04")], [SMALL, LARGE], NOTHING_ASKED
    )
    both = task(memory_bytes=2 << 30, base="ubuntu:24.04")
    with pytest.raises(InvalidInput):
        builders.check([both], [SMALL, LARGE], NOTHING_ASKED)


def test_all_that_is_refused_is_told_at_once() -> None:
    other = msgspec.structs.replace(task(memory_bytes=8 << 30), name="other")
    with pytest.raises(InvalidInput, match=r"2 tasks are refused: made: .*; other: ") as caught:
        builders.check([task(base="x"), other], [LARGE], NOTHING_ASKED)
    assert "muster tasks check" in caught.value.way_out


def test_a_host_s_limits_and_images_survive_the_registry() -> None:
    offer = Offer(True, ("a:*", "b"), Limits(cpus=2.0), limits_cpu=False)
    assert box_offer.read(offer.info()) == offer


@pytest.mark.parametrize("info", [{}, {"limits_max": "{", "bases": "*"}])
def test_a_host_that_says_nothing_readable_refuses_nothing(info: dict[str, str]) -> None:
    builders.check([task(base="x", memory_bytes=8 << 40)], [info], NOTHING_ASKED)


@pytest.mark.parametrize(
    ("unbuildable", "hosts"),
    [("line 3: ARG", [NATIVE, BUILDER]), ("", [NATIVE]), ("", [])],
    ids=["a host builds", "nothing to build", "no host yet"],
)
def test_any_other_task_is_taken(unbuildable: str, hosts: list[dict[str, str]]) -> None:
    builders.check([task(unbuildable)], hosts, NOTHING_ASKED)


def test_such_a_task_gets_its_box_only_where_one_can_be_built() -> None:
    hosts = Hosts()
    hosts.listed(HOSTS)
    assert {hosts.pick(0.0, builds=True).host for _ in range(3)} == {"d"}
    assert hosts.pick(0.0, builds=True, avoid="d").host == "d"
    hosts.listed(HOSTS[:1])
    assert hosts.pick(0.0, builds=True).host == ""


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
