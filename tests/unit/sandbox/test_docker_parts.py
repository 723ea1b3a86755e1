"""The pure parts of the docker backend: framing, back-off, what a verifier gets, counters."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from muster.errors import InvalidInput
from services.sandbox.adapters.docker import transfer
from services.sandbox.adapters.docker.boots import BootRules, Boots
from services.sandbox.adapters.docker.building import with_known_bases
from services.sandbox.adapters.docker.counters import Counts, Groups
from services.sandbox.adapters.docker.engine import Change
from services.sandbox.adapters.docker.shell import Control, Session, Until
from services.sandbox.adapters.docker.transfer import ADDED, CHANGED, GONE, Carried

TOKEN = b"0123456789abcdef"


@pytest.mark.parametrize("piece", [1, 2, 5, 15, 16, 17, 100])
def test_an_output_ends_at_its_token_in_whatever_pieces_it_comes(piece: int) -> None:
    data = b"before 0123456789abcde no" + TOKEN + b"of somebody else"
    until = Until(TOKEN)
    got = b"".join(until.add(data[at : at + piece]) for at in range(0, len(data), piece))
    assert (got + until.rest(), until.found) == (b"before 0123456789abcde no", True)


def test_an_output_that_ends_without_its_token_is_whole() -> None:
    until = Until(TOKEN)
    assert until.add(b"all of it 0123") + until.rest() == b"all of it 0123"
    assert not until.found


def control(data: bytes) -> Control:
    made = Control(TOKEN)
    made.add(data)
    return made


def ended(state: bytes, line: bytes = b"exit 3 1") -> Control:
    return control(b"known 1:50 7:51\n" + line + b"\n" + state + b"\n" + TOKEN + b"\n")


def test_the_control_channel_tells_processes_exit_code_and_session() -> None:
    found = ended(b"/app\0COLOUR=blue\0ODD=a=b\nc\0")
    assert found.ended
    assert found.known == ["1:50", "7:51"]
    assert found.exit() == (3, True)
    assert found.session(Session()) == Session("/app", {"COLOUR": "blue", "ODD": "a=b\nc"})


@pytest.mark.parametrize(
    "state", [b"", b"cut short", b"/app\0" + b"x" * (300 << 10) + b"\0"], ids=["none", "cut", "big"]
)
def test_a_session_that_cannot_be_read_is_none(state: bytes) -> None:
    assert ended(state).session(Session("/before", {"A": "1"})) is None


def test_what_acts_on_the_shell_itself_is_not_carried_and_an_empty_one_changes_nothing() -> None:
    found = ended(b"/app\0BASH_ENV=/evil\0A=1\0").session(Session())
    assert found == Session("/app", {"A": "1"})
    before = Session("/before", {"A": "1"})
    assert ended(b"relative\0").session(before) == before


@pytest.mark.parametrize(
    "data", [b"", b"known", b"\n" * 9, b"known 1:1\nexit x 1\n\n" + TOKEN + b"\n", TOKEN]
)
def test_nonsense_on_the_control_channel_tells_nothing(data: bytes) -> None:
    found = control(data)
    assert found.exit() is None
    assert found.session(Session()) is None


def test_the_control_channel_is_bounded() -> None:
    found = control(b"known 1:1\n")
    for _ in range(40):
        found.add(b"x" * (100 << 10))
    assert len(found._data) <= 1 << 20


def test_after_trouble_of_the_engine_starts_wait_ever_longer_up_to_a_bound() -> None:
    boots = Boots(BootRules(first_s=1.0, longest_s=4.0))
    assert boots.wait_s(10.0) == 0.0
    waits = []
    for _ in range(5):
        boots.failed(10.0)
        waits.append(boots.wait_s(10.0))
    assert waits == [1.0, 2.0, 4.0, 4.0, 4.0]
    boots.succeeded()
    assert boots.wait_s(10.0) == 0.0


def carried(*changes: tuple[str, int], below: Carried = Carried()) -> Carried:  # noqa: B008
    return transfer.merged(below, [Change(path, kind) for path, kind in sorted(changes)])


def test_nothing_that_decides_what_code_runs_is_carried_over() -> None:
    names = ["/usr", "/bin/sh", "/lib64/ld.so", "/etc/ld.so.preload", "/tests/t", "/logs", "/run/x"]
    plan = transfer.plan(carried(("/app/a", ADDED), *((name, ADDED) for name in names)))
    assert (plan.folders, plan.trees) == ((), ("/app/a",))
    assert transfer.plan(carried(("/usr/bin/bash", GONE), ("/opt/a", GONE))).gone == ("/opt/a",)


def test_a_new_folder_travels_whole_and_a_changed_one_before_what_is_in_it() -> None:
    plan = transfer.plan(
        carried(
            ("/opt", CHANGED), ("/opt/new", ADDED), ("/opt/new/a", ADDED), ("/opt/old", CHANGED)
        )
    )  # fmt: skip
    assert (plan.folders, plan.trees) == (("/opt",), ("/opt/new", "/opt/old"))


def test_many_changed_paths_are_sifted_from_their_top_level_folder() -> None:
    names = [f"/tmp/f{number:03}" for number in range(100)]
    plan = transfer.plan(carried(("/tmp", CHANGED), *((name, ADDED) for name in names)))
    assert (plan.folders, plan.trees, plan.sifted) == ((), (), ("/tmp",))
    assert plan.wanted == {"/tmp", *names}


def test_what_came_later_counts_over_what_lies_below() -> None:
    below = carried(("/opt/a", CHANGED), ("/opt/b", ADDED), ("/opt/b/c", ADDED), ("/opt/d", GONE))
    both = carried(("/opt/b", GONE), ("/opt/d", ADDED), below=below)
    assert [change.path for change in both.there] == ["/opt/a", "/opt/d"]
    assert both.gone == ("/opt/b", "/opt/d")


def test_a_tar_of_the_engine_is_copied_by_whole_names_without_devices_and_code() -> None:
    source, target = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=source, mode="w") as archive:
        for name, kind in [("top/a", tarfile.REGTYPE), ("top/dev", tarfile.CHRTYPE)]:
            info = tarfile.TarInfo(name)
            info.type = kind
            archive.addfile(info)
        link = tarfile.TarInfo("top/same")
        link.type, link.linkname = tarfile.LNKTYPE, "top/a"
        archive.addfile(link)
        archive.addfile(tarfile.TarInfo("top/../../usr/bin/sh"))
        named = tarfile.TarInfo("top/b")
        named.pax_headers = {"path": "top/ü", "linkpath": "usr/bin", "size": "0"}
        archive.addfile(named)
    source.seek(0)
    with tarfile.open(fileobj=target, mode="w") as archive:
        transfer.copy(source, "/opt/top", archive, frozenset())
    target.seek(0)
    with tarfile.open(fileobj=target) as archive:
        found = {member.name: member.linkname for member in archive}
    assert found == {"opt/top/a": "", "opt/top/same": "opt/top/a", "opt/top/ü": ""}


def test_images_that_a_dockerfile_names_are_those_that_this_host_knows() -> None:
    text = (
        "# c\nFROM python:3.12 AS one\nRUN a\nFROM --platform=x one as two\nfrom alpine\nRUN FROM\n"
    )
    assert with_known_bases(text, lambda image: f"id-{image}") == (
        "# c\nFROM id-python:3.12 AS one\nRUN a\nFROM --platform=x one as two\n"
        "from id-alpine\nRUN FROM\n"
    )


def test_an_image_named_by_a_variable_is_refused() -> None:
    with pytest.raises(InvalidInput) as caught:
        with_known_bases("ARG A=x\nFROM $A\n", str)
    assert caught.value.value == "FROM $A"


def test_counters_are_read_from_either_hierarchy_and_differ_by_what_came_since(
    tmp_path: Path,
) -> None:
    for name, text in {
        "memory/docker/c1/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
        "pids/docker/c1/pids.events": "max 5\n",
        "pids/docker/c1/cgroup.procs": "10\n11\n",
        "cpuacct/docker/c1/cpuacct.usage": "1500000000\n",
        "unified/docker/c1/cpu.pressure": "some avg10=0 avg60=0 avg300=0 total=250000\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    groups = Groups("c1", tmp_path)
    assert groups.shown
    found = groups.read()
    assert (found.oom_kills, found.pids_refused, found.cpu_s, found.processes) == (2, 5, 1.5, 2)
    since = found.since(Counts(oom_kills=1, pids_refused=5, cpu_s=1.0, cpu_stall_s=0.1))
    assert (since.oom_kills, since.pids_refused, since.cpu_s) == (1, 0, 0.5)
    assert since.cpu_stall_s == pytest.approx(0.15)
    assert since.io_stall_s == -1.0


def test_of_groups_that_do_not_show_here_nothing_is_made_up(tmp_path: Path) -> None:
    groups = Groups("c1", tmp_path)
    assert not groups.shown
    assert groups.read() == Counts()
