"""Archives for boxes: what may travel does, unchanged; what would leave the folder is named."""

from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.errors import InvalidInput
from services.sandbox.adapters import archives
from services.sandbox.box import CopiedFile

MOST = 1 << 20


def tar(*entries: tarfile.TarInfo, data: bytes = b"") -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for info in entries:
            info.size = len(data) if info.isreg() else 0
            archive.addfile(info, io.BytesIO(data) if info.isreg() else None)
    return sink.getvalue()


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def test_files_folders_and_links_come_back_as_they_went() -> None:
    files = (
        CopiedFile("top", "folder", 0o755),
        CopiedFile("top/deep/run.sh", "file", 0o755, b"echo\n"),
        CopiedFile("top/empty", "file", 0o600),
        CopiedFile("top/link", "link", 0o777, link="deep/run.sh"),
        CopiedFile("top/deep/up", "link", 0o777, link="../empty"),
    )
    assert sorted(archives.read(archives.write(files), MOST), key=lambda f: f.path) == sorted(
        files, key=lambda f: f.path
    )


def test_a_folder_as_tar_makes_it_is_read() -> None:
    archive = tar(entry("./", tarfile.DIRTYPE), entry("./a/", tarfile.DIRTYPE), entry("./a/b"))
    assert [file.path for file in archives.read(archive, MOST)] == ["a", "a/b"]


def test_a_hard_link_becomes_a_file_of_its_own() -> None:
    archive = tar(entry("a"), entry("b", tarfile.LNKTYPE, "a"), data=b"same")
    assert [(f.kind, f.data) for f in archives.read(archive, MOST)] == [("file", b"same")] * 2


@pytest.mark.parametrize(
    "bad",
    [
        entry("/etc/passwd"),
        entry("../out"),
        entry("a/../../out"),
        entry("a//b"),
        entry("device", tarfile.CHRTYPE),
        entry("disk", tarfile.BLKTYPE),
        entry("pipe", tarfile.FIFOTYPE),
        entry("hard", tarfile.LNKTYPE, "/etc/passwd"),
        entry("hard", tarfile.LNKTYPE, "../x"),
        entry("absolute", tarfile.SYMTYPE, "/etc/passwd"),
        entry("up", tarfile.SYMTYPE, "../x"),
        entry("a/up", tarfile.SYMTYPE, "../../x"),
        entry("late", tarfile.SYMTYPE, "a/../../x"),
        entry("x" * 2000),
    ],
    ids=lambda info: f"{info.name[:12]}>{info.linkname}",
)
def test_what_would_leave_the_folder_or_is_special_is_refused_by_name(
    bad: tarfile.TarInfo,
) -> None:
    with pytest.raises(InvalidInput) as caught:
        archives.read(tar(entry("good"), bad), MOST)
    assert caught.value.field == "archive"
    assert bad.name[:20] in str(caught.value.value)
    assert caught.value.way_out


def test_nothing_is_written_through_a_link_of_the_same_archive() -> None:
    archive = tar(entry("link", tarfile.SYMTYPE, "elsewhere"), entry("link/file"))
    with pytest.raises(InvalidInput, match="below what is no folder"):
        archives.read(archive, MOST)


def test_bytes_are_bounded_before_and_while_reading() -> None:
    with pytest.raises(InvalidInput, match="too large"):
        archives.read(b"\0" * (archives.ENTRIES_MAX * 2048 + 2000), 1024)
    with pytest.raises(InvalidInput, match="holds too much"):
        archives.read(tar(entry("a"), data=b"x" * 2000), 1024)


def test_a_box_s_own_trick_is_refused_on_the_way_out() -> None:
    with pytest.raises(InvalidInput) as caught:
        archives.write([CopiedFile("a/link", "link", link="/etc/passwd")])
    assert caught.value.field == "path"


@given(st.binary(max_size=3000))
def test_whatever_is_no_archive_is_an_error_with_a_field(data: bytes) -> None:
    try:
        found = archives.read(data, MOST)
    except InvalidInput as error:
        found, field = (), error.field
    else:
        field = "archive"
    assert field == "archive"
    assert all(not file.path.startswith("/") for file in found)


PLACES = st.sampled_from(["a", "b", "d/a", "d/b", "d/e/a"])
TARGETS = st.lists(st.sampled_from(["..", ".", "a", "b", "d", "e"]), min_size=1, max_size=6)


def leaves(start: str, link: str, links: dict[str, str], left: int = 40) -> bool:
    """Whether following a link of a folder, by way of all others in it, ever gets out of it."""
    at = start.split("/")[:-1]
    todo = link.split("/")
    while todo and left:
        part, left = todo.pop(0), left - 1
        if part == "..":
            if not at:
                return True
            at.pop()
        elif part not in ("", "."):
            met = links.get("/".join([*at, part]))
            if met is None:
                at.append(part)
            else:
                todo = met.split("/") + todo
    return False


@given(st.dictionaries(PLACES, TARGETS.map("/".join), max_size=4))
def test_no_link_that_is_taken_leaves_its_folder_by_way_of_others(links: dict[str, str]) -> None:
    entries = [CopiedFile(path, "link", link=link) for path, link in links.items()]
    try:
        archives.checked(entries, "archive")
    except InvalidInput:
        return
    assert not any(leaves(path, link, links) for path, link in links.items())


def test_headers_within_headers_are_refused_and_end_nothing() -> None:
    long_name = tar(entry("x" * 150))[:1024]  # a header for a longer name, and the name
    with pytest.raises(InvalidInput, match="readable tar"):
        archives.read(long_name * 2000 + bytes(1024), 8 << 20)
