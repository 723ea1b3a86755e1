"""Packing is deterministic, and unpacking accepts nothing that packing would not make."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.archive import FILE_BYTES_MAX, FILES_MAX, TaskFile, pack, pack_files, unpack
from muster.errors import InvalidInput

MakeTask = Callable[..., Path]


def tar_of(*members: tarfile.TarInfo) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(b"x" * member.size))
    return sink.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, size, "/etc/shadow" if kind in b"12" else ""
    return info


def test_times_owners_and_odd_mode_bits_do_not_change_the_bytes(make_task: MakeTask):
    folder = make_task()
    before = pack(folder)
    os.utime(folder / "instruction.md", (1, 1))
    (folder / "instruction.md").chmod(0o600)
    assert pack(folder) == before


def test_the_order_in_which_files_were_found_does_not_change_the_bytes():
    one, two = TaskFile(0o644, b"1"), TaskFile(0o644, b"2")
    assert pack_files({"a": one, "b": two}) == pack_files({"b": two, "a": one})


def test_content_and_the_executable_bit_do_change_the_bytes(make_task: MakeTask):
    folder = make_task()
    plain = pack(folder)
    (folder / "tests/test.sh").chmod(0o755)
    executable = pack(folder)
    (folder / "tests/test.sh").write_text("exit 0\n")
    assert len({plain, executable, pack(folder)}) == 3


def test_only_what_counts_travels(make_task: MakeTask):
    folder = make_task("hello", {"README.md": "notes", "trajectory.json": "{}"})
    assert set(unpack(pack(folder))) == {
        "instruction.md",
        "task.toml",
        "environment/Dockerfile",
        "environment/a.txt",
        "tests/test.sh",
    }


def test_files_in_memory_survive_the_round_trip():
    files = {"tests/é.sh": TaskFile(0o755, b"\0\xff"), "instruction.md": TaskFile(0o644, b"")}
    assert unpack(pack_files(files)) == files


@pytest.mark.parametrize("place", ["environment/link", "tests"])
def test_a_link_in_a_task_folder_is_refused(make_task: MakeTask, place: str):
    folder = make_task("hello", {"tests/test.sh": None} if place == "tests" else None)
    (folder / place).symlink_to("/etc")
    with pytest.raises(InvalidInput, match="a link"):
        pack(folder)


def test_a_pipe_in_a_task_folder_is_refused_without_opening_it(make_task: MakeTask):
    folder = make_task()
    os.mkfifo(folder / "environment/pipe")
    with pytest.raises(InvalidInput, match="not a plain file"):
        pack(folder)


def test_a_file_over_the_bound_is_refused(make_task: MakeTask):
    folder = make_task()
    (folder / "environment/big").write_bytes(b"x" * (FILE_BYTES_MAX + 1))
    with pytest.raises(InvalidInput, match="over 1048576 bytes"):
        pack(folder)


def test_too_many_files_are_refused(make_task: MakeTask):
    folder = make_task()
    for i in range(FILES_MAX):
        (folder / f"environment/{i}").touch()
    with pytest.raises(InvalidInput, match="too large"):
        pack(folder)


@pytest.mark.parametrize(
    "members",
    [
        [member("../up")],
        [member("/etc/passwd")],
        [member("a/./b")],
        [member("a//b")],
        [member("a\nb")],
        [member("a\\b")],
        [member("x" * 201)],
        [member("a"), member("a")],
        [member("a"), member("a/b")],
        [member("link", tarfile.SYMTYPE)],
        [member("hard", tarfile.LNKTYPE)],
        [member("null", tarfile.CHRTYPE)],
        [member("pipe", tarfile.FIFOTYPE)],
        [member("folder", tarfile.DIRTYPE)],
        [member("big", size=FILE_BYTES_MAX + 1)],
        [member(str(i)) for i in range(FILES_MAX + 1)],
    ],
    ids=lambda members: ascii(f"{members[-1].name[:12]}-{members[-1].type.decode()}"),
)
def test_an_archive_that_pack_would_not_make_is_refused(members: list[tarfile.TarInfo]):
    with pytest.raises(InvalidInput) as caught:
        unpack(tar_of(*members))
    assert caught.value.field == "task"


@pytest.mark.parametrize("damage", [lambda a: b"no tar at all" * 99, lambda a: a[:700]])
def test_a_damaged_archive_is_refused(damage: Callable[[bytes], bytes]):
    with pytest.raises(InvalidInput):
        unpack(damage(pack_files({"instruction.md": TaskFile(0o644, b"y" * 2000)})))
