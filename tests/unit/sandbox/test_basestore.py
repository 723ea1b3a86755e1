"""Tarballs that would write elsewhere, folders that changed, hosts that unpack at the same time."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.errors import ConfigError
from services.sandbox.adapters.native.basefolder import trouble
from services.sandbox.adapters.native.basestore import folder_digest, prepare
from services.sandbox.adapters.native.basetar import BadTarball, Bounds, unpack
from services.sandbox.bases import BaseSetting, Kind

Entry = tuple[str, str, object]  # kind, name, and content or target
BOUNDS = Bounds(files=100, size=1 << 20)


def tarball(path: Path, *entries: Entry, mode: int = 0o755) -> Path:
    kinds = {
        "file": tarfile.REGTYPE, "dir": tarfile.DIRTYPE, "link": tarfile.SYMTYPE,
        "hard": tarfile.LNKTYPE, "char": tarfile.CHRTYPE, "fifo": tarfile.FIFOTYPE,
    }  # fmt: skip
    with tarfile.open(path, "w") as archive:
        for kind, name, what in entries:
            member = tarfile.TarInfo(name)
            member.type, member.mode, member.mtime = kinds[kind], mode, 1_000_000
            member.uid = member.gid = 4242
            if kind in ("link", "hard"):
                member.linkname = str(what)
            data = what if isinstance(what, bytes) else b""
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


ROOT: tuple[Entry, ...] = (
    ("dir", "./usr", None),
    ("file", "./usr/bin/bash", b"#!bash"),
    ("file", "./usr/bin/env", b"#!env"),
    ("link", "./bin", "usr/bin"),
    ("link", "./etc/mtab", "/proc/self/mounts"),
    ("hard", "./usr/bin/sh", "./usr/bin/bash"),
)


def test_a_root_file_system_comes_out_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    done = unpack(tarball(tmp_path / "t.tar", *ROOT), tmp_path / "out", BOUNDS)
    out = tmp_path / "out"
    assert (out / "usr/bin/bash").read_bytes() == b"#!bash"
    assert os.readlink(out / "bin") == "usr/bin"
    assert os.readlink(out / "etc/mtab") == "/proc/self/mounts"
    assert (out / "usr/bin/sh").samefile(out / "usr/bin/bash")
    assert (out / "usr/bin/bash").stat().st_mtime == 1_000_000
    assert (done.files, done.skipped) == (6, 0)
    assert trouble(str(out)) == ""


def test_owners_and_rights_of_the_tarball_are_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    entries: tuple[Entry, ...] = (("file", "su", b"x"), ("dir", "tmp", None))
    unpack(tarball(tmp_path / "t.tar", *entries, mode=0o7777), tmp_path / "out", BOUNDS)
    su, tmp = (tmp_path / "out/su").stat(), (tmp_path / "out/tmp").stat()
    assert (su.st_mode & 0o7777, tmp.st_mode & 0o7777) == (0o777, 0o1777)
    assert su.st_uid == tmp.st_uid == os.geteuid()


def test_devices_and_pipes_are_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    entries: tuple[Entry, ...] = (("char", "dev/null", None), ("fifo", "run/pipe", None))
    done = unpack(tarball(tmp_path / "t.tar", *entries), tmp_path / "out", BOUNDS)
    assert done.skipped == 2
    assert list((tmp_path / "out").rglob("*")) == []


@pytest.mark.parametrize(
    "entries",
    [
        (("file", "/abs", b"x"),),
        (("link", "nowhere", ""),),
        (("file", "../up", b"x"),),
        (("file", "a/../../up", b"x"),),
        (("link", "way", "{outside}"), ("file", "way/x", b"x")),
        (("link", "way", "{outside}"), ("dir", "way", None)),
        (("link", "a", "."), ("link", "a/b", ".."), ("file", "a/b/x", b"x")),
        (("hard", "x", "{outside}/victim"),),
        (("hard", "x", "../outside/victim"),),
        (("link", "way", "{outside}"), ("hard", "x", "way/victim")),
        (("file", "a", b"x"), ("file", "a/b", b"x")),
        (("dir", "a", None), ("file", "a", b"x")),
        tuple(("file", f"f{n}", b"") for n in range(101)),
        (("file", "big", bytes((1 << 20) + 1)),),
        (("file", "/".join("d" * 200), b"x"),),
    ],
)
def test_what_would_write_elsewhere_or_without_bound_is_refused(
    entries: tuple[Entry, ...], tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "victim").write_text("kept")
    (tmp_path / "out").mkdir()
    told = tuple(
        (kind, name, what.format(outside=outside) if isinstance(what, str) else what)
        for kind, name, what in entries
    )
    with pytest.raises(BadTarball):
        unpack(tarball(tmp_path / "t.tar", *told), tmp_path / "out", BOUNDS)
    assert [path.name for path in outside.iterdir()] == ["victim"]
    assert (outside / "victim").read_text() == "kept"
    assert (outside / "victim").stat().st_nlink == 1


def test_a_link_that_was_there_is_replaced_and_never_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (tmp_path / "out").mkdir()
    entries: tuple[Entry, ...] = (("link", "x", str(victim)), ("file", "x", b"new"))
    unpack(tarball(tmp_path / "t.tar", *entries), tmp_path / "out", BOUNDS)
    assert victim.read_text() == "kept"
    assert (tmp_path / "out/x").read_bytes() == b"new"
    assert not (tmp_path / "out/x").is_symlink()


@pytest.mark.parametrize("content", [b"", b"no tarball at all", b"\x1f\x8b\x08cut"])
def test_what_is_no_tarball_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "t.tar").write_bytes(content)
    (tmp_path / "out").mkdir()
    with pytest.raises(BadTarball, match="cannot be read"):
        unpack(tmp_path / "t.tar", tmp_path / "out", BOUNDS)


def make_root(folder: Path) -> Path:
    (folder / "usr/bin").mkdir(parents=True)
    for name in ("bash", "env"):
        (folder / "usr/bin" / name).write_text("#!")
        (folder / "usr/bin" / name).chmod(0o755)
    (folder / "bin").symlink_to("usr/bin")
    return folder


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda root: (root / "usr/bin/bash").unlink(), "no /usr/bin/bash"),
        (lambda root: (root / "usr/bin/env").chmod(0o644), "no /usr/bin/env"),
        (lambda root: (root / "dev").symlink_to("/etc"), "/dev has to be a plain folder"),
        (lambda root: (root / "run").symlink_to("tmp"), "/run has to be a plain folder"),
        (lambda root: (root / "proc").write_text(""), "/proc has to be a plain folder"),
    ],
)
def test_what_no_box_could_start_from_is_refused_by_name(
    spoil: Callable[[Path], object], problem: str, tmp_path: Path
) -> None:
    root = make_root(tmp_path / "root")
    assert trouble(str(root)) == ""
    spoil(root)
    assert problem in trouble(str(root))


def test_a_shell_behind_links_is_looked_up_as_the_box_would(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root")
    (root / "usr/bin/bash").rename(root / "usr/bin/real")
    (root / "usr/bin/bash").symlink_to("/bin/../bin/./real")
    assert trouble(str(root)) == ""
    (root / "usr/bin/bash").unlink()
    (root / "usr/bin/bash").symlink_to("/usr/bin/python3")  # there on the host, absent in the root
    assert "no /usr/bin/bash" in trouble(str(root))
    (root / "usr/bin/bash").unlink()
    (root / "usr/bin/bash").symlink_to("bash")
    assert "no /usr/bin/bash" in trouble(str(root))


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "usr/bin/env").write_text("!#"),  # same size
        lambda root: (root / "usr/bin/env").chmod(0o700),
        lambda root: (root / "usr/bin/env").rename(root / "usr/bin/venv"),
        lambda root: (root / "new").mkdir(),
        lambda root: ((root / "bin").unlink(), (root / "bin").symlink_to("usr/sbin")),
    ],
)
def test_any_change_of_a_folder_gives_another_digest_and_a_copy_the_same(
    change: Callable[[Path], object], tmp_path: Path
) -> None:
    root = make_root(tmp_path / "root")
    once = folder_digest(root)
    shutil.copytree(root, tmp_path / "copy", symlinks=True)
    os.utime(tmp_path / "copy/usr/bin/env", (1, 1))
    assert folder_digest(tmp_path / "copy") == once
    times = (root / "usr/bin/env").stat()
    change(root)
    if (root / "usr/bin/env").exists():
        os.utime(root / "usr/bin/env", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert folder_digest(root) != once


def setting(path: Path, kind: Kind = Kind.TARBALL, digest: str = "") -> dict[str, BaseSetting]:
    return {"img": BaseSetting(kind, str(path), digest)}


async def test_bases_are_named_by_what_they_hold(tmp_path: Path) -> None:
    packed = tarball(tmp_path / "t.tar", *ROOT)
    root = make_root(tmp_path / "root")
    settings = {
        "scratch": BaseSetting(Kind.HOST),
        **setting(packed),
        "dir": BaseSetting(Kind.FOLDER, str(root), folder_digest(root)),
    }
    done = await prepare(settings, tmp_path / "cache")
    digest = hashlib.sha256(packed.read_bytes()).hexdigest()
    assert done.names == {
        "scratch": "host",
        "img": f"sha256:{digest}",
        "dir": f"sha256:{folder_digest(root)}",
    }
    assert done.folders[done.names["img"]] == str(tmp_path / "cache" / digest / "root")
    assert done.folders[done.names["dir"]] == str(root)


async def test_a_tarball_is_unpacked_once_whoever_asks(tmp_path: Path) -> None:
    packed = tarball(tmp_path / "t.tar", *ROOT)
    async with asyncio.TaskGroup() as group:
        for _ in range(6):
            group.create_task(prepare(setting(packed), tmp_path / "cache"))
    [root] = (tmp_path / "cache").glob("*/root")
    born = root.stat().st_ino
    await prepare(setting(packed), tmp_path / "cache")
    assert root.stat().st_ino == born
    assert sorted(p.suffix for p in (tmp_path / "cache").iterdir()) == ["", ".lock"]


async def test_what_a_killed_host_had_half_unpacked_is_not_used(tmp_path: Path) -> None:
    packed = tarball(tmp_path / "t.tar", *ROOT)
    digest = hashlib.sha256(packed.read_bytes()).hexdigest()
    half = tmp_path / f"cache/.{digest}.part/root"
    half.mkdir(parents=True)
    (half / "left").write_text("over")
    done = await prepare(setting(packed), tmp_path / "cache")
    assert not (Path(done.folders[f"sha256:{digest}"]) / "left").exists()


async def test_a_failed_unpacking_leaves_nothing_to_be_taken_for_whole(tmp_path: Path) -> None:
    packed = tarball(tmp_path / "t.tar", ("file", "a", b"x"), ("file", "/b", b"x"))
    with pytest.raises(ConfigError, match="leads out of the root"):
        await prepare(setting(packed), tmp_path / "cache")
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".lock"]


@pytest.mark.parametrize("kind", [Kind.TARBALL, Kind.FOLDER])
async def test_another_content_than_was_pinned_is_refused_with_what_it_is(
    kind: Kind, tmp_path: Path
) -> None:
    folder = kind is Kind.FOLDER
    path = make_root(tmp_path / "x") if folder else tarball(tmp_path / "x.tar", *ROOT)
    real = folder_digest(path) if folder else hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(ConfigError, match=f"has the digest sha256:{real}") as caught:
        await prepare(setting(path, kind, "0" * 64), tmp_path / "cache")
    assert caught.value.field == 'sandbox.bases."img"'
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("kind", [Kind.TARBALL, Kind.FOLDER])
async def test_what_is_not_there_is_refused_with_field_and_value(
    kind: Kind, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="No such file") as caught:
        await prepare(setting(tmp_path / "none", kind), tmp_path / "cache")
    assert caught.value.value == str(tmp_path / "none")


async def test_an_image_as_docker_saves_it_is_told_apart(tmp_path: Path) -> None:
    packed = tarball(tmp_path / "t.tar", ("file", "manifest.json", b"[]"))
    with pytest.raises(ConfigError, match="no /usr/bin/bash") as caught:
        await prepare(setting(packed), tmp_path / "cache")
    assert "docker export" in caught.value.way_out
